"""Set-aside transactions: committed, but not publishable with the others now, or behind such a transaction.

Pure. Messages of one key reach their target in the order of their decisions. So each set-aside transaction stands in a
line for each target and key of its messages. Later transactions of a line are set aside behind it. Only a transaction
at the front of all its lines is tried. Messages without a key have no order and stand in no line.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import takewhile

from penstock.transactions.core.pending import Pending


class SetAside:
    """The set-aside transactions of one partition. Not thread-safe: the engine's thread drives it."""

    def __init__(self) -> None:
        # By id: the topic that it waits for (None: it only stands behind others), and its lines.
        self._entries: dict[str, tuple[str | None, tuple[int, ...]]] = {}
        #: The transactions of each line, in their order. No line is empty.
        self.lines: dict[int, OrderedDict[str, Pending]] = {}
        # The transactions at the front of their lines, by the topic that they wait for.
        self._fronts: dict[str, dict[str, Pending]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def is_behind(self, pending: Pending) -> bool:
        """Tell whether a transaction must stay behind one that is set aside."""
        return any(self._is_behind_in(place, pending.sequence) for place in pending.places)

    def _is_behind_in(self, place: int, sequence: int) -> bool:
        line = self.lines.get(place)
        return line is not None and next(iter(line.values())).sequence < sequence

    def behind(self, waiting: Pending) -> Pending | None:
        """Return a transaction that stands in front of a set-aside one, or None."""
        for place in waiting.places:
            first = next(iter(self.lines.get(place, {}).values()), None)
            if first is not None and first is not waiting:
                return first
        return None

    def add(self, waiting: Pending, topic: str | None) -> None:
        """Set a transaction aside, in its place among the others.

        It waits for a topic; None: it only stands behind others. Usually its place is the last. A transaction that
        failed goes before those that were set aside while it was being published.
        """
        transaction_id = waiting.transaction_id
        waiting.held = True
        places = waiting.places
        self._entries[transaction_id] = topic, places
        for place in places:
            self.lines[place] = self._with(waiting, self.lines.get(place, OrderedDict()))
        if topic is not None and self.behind(waiting) is None:
            self._fronts.setdefault(topic, {})[transaction_id] = waiting

    def _with(self, waiting: Pending, line: OrderedDict[str, Pending]) -> OrderedDict[str, Pending]:
        later = list(takewhile(lambda other: other.sequence > waiting.sequence, reversed(line.values())))
        line[waiting.transaction_id] = waiting
        for follower in reversed(later):
            name = follower.transaction_id
            line.move_to_end(name)
            self._fronts.get(self._entries[name][0] or "", {}).pop(name, None)
        return line

    def remove(self, waiting: Pending) -> list[Pending]:
        """Remove a transaction. Return those that only it kept set aside: they are removed too.

        Followers that wait for a topic themselves stay.
        """
        if waiting.transaction_id not in self._entries:
            return []
        freed: list[Pending] = []
        removed = [waiting]
        while removed:
            for follower in self._take_out(removed.pop()):
                topic = self._entries[follower.transaction_id][0]
                if topic is None:
                    freed.append(follower)
                    removed.append(follower)
                else:
                    self._fronts.setdefault(topic, {})[follower.transaction_id] = follower
        freed.sort(key=lambda waiting: waiting.sequence)
        return freed

    def _take_out(self, waiting: Pending) -> list[Pending]:
        """Remove one transaction. Return those that are now at the front of all their lines."""
        transaction_id = waiting.transaction_id
        waiting.held = False
        topic, places = self._entries.pop(transaction_id)
        if topic is not None:
            fronts = self._fronts.get(topic, {})
            fronts.pop(transaction_id, None)
            if not fronts:
                self._fronts.pop(topic, None)
        followers: list[Pending] = []
        for place in places:
            line = self.lines.get(place)
            if line is None or line.pop(transaction_id, None) is None:
                continue
            if not line:
                del self.lines[place]
                continue
            first = next(iter(line.values()))
            if first not in followers and self.behind(first) is None:
                followers.append(first)
        return followers

    def release(self, topic: str, leaves: Callable[[Pending], bool]) -> list[Pending]:
        """Remove and return what waits for a topic and is not being published, with all that only it kept set aside.

        A transaction for which `leaves` is true stays.
        """
        freed: list[Pending] = []
        while fronts := [front for front in self.fronts(topic) if not (front.in_flight or leaves(front))]:
            for front in fronts:
                freed += [front, *self.remove(front)]
        return freed

    def refile(self, transaction_id: str, topic: str) -> None:
        """Let a set-aside transaction wait for another topic. It keeps its place in its lines."""
        if transaction_id not in self._entries:
            return
        former, places = self._entries[transaction_id]
        self._entries[transaction_id] = topic, places
        fronts = self._fronts.get(former or "", {})
        waiting = fronts.pop(transaction_id, None)
        if waiting is not None:
            self._fronts.setdefault(topic, {})[transaction_id] = waiting
        if not fronts:
            self._fronts.pop(former or "", None)

    def topic(self, transaction_id: str) -> str | None:
        """Return the topic that a set-aside transaction waits for. None: it only stands behind others."""
        return self._entries[transaction_id][0]

    def topics(self) -> list[str]:
        """Return the topics with a transaction that could be tried."""
        return [topic for topic, fronts in self._fronts.items() if fronts]

    def fronts(self, topic: str) -> Iterator[Pending]:
        """Yield the transactions that could be tried for a topic, mostly in the order of the decisions."""
        yield from self._fronts.get(topic, {}).values()

    def take(self, topic: str, most: int, leaves: Callable[[Pending], bool]) -> list[Pending]:
        """Return the transactions to try next for a topic, in order. Changes nothing.

        A transaction for which `leaves` is true is not tried, nor are those behind it.
        """
        taken: list[Pending] = []
        for front in self._fronts.get(topic, {}).values():
            if len(taken) >= most:
                break
            if front.in_flight or leaves(front):
                continue
            taken.append(front)
            taken.extend(self._chain(front, topic, most - len(taken), leaves))
        return taken

    def _chain(self, front: Pending, topic: str, most: int, leaves: Callable[[Pending], bool]) -> Iterator[Pending]:
        """Yield the followers that can be tried together with a front: a hot key needs few Kafka transactions."""
        places = front.places
        if len(places) != 1:
            return
        line = iter(self.lines[places[0]].values())
        next(line)
        for follower in line:
            alone = len(follower.places) == 1
            if most <= 0 or not alone or follower.in_flight or leaves(follower) or follower.topics != (topic,):
                return
            most -= 1
            yield follower
