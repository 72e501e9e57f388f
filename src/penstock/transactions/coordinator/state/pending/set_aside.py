"""Committed transactions that cannot be published with the others now, and those that must stay behind them.

Pure. Messages of one key are published to their target in the order of their decisions. So what is set aside stands in
a line for each target and key of its messages, and later ones of a line are set aside too, behind it. Only who is in
front of all its lines is tried. Messages without a key have no order, and stand in no line.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator

from penstock.transactions.coordinator.state.pending.pending import Pending
from penstock.transactions.wire.ops import Verdict

#: A hash of a target and a key: payloads may have left the memory. Two that share one by chance are one line.
_Place = int


class SetAside:
    """What is set aside in one half partition. Not thread-safe: its coordinator's thread drives it."""

    def __init__(self) -> None:
        # By id: for whose sake each was set aside (None: it stands behind others), and in which lines it stands.
        self._entries: dict[str, tuple[str | None, tuple[_Place, ...]]] = {}
        self._lines: dict[_Place, OrderedDict[str, Pending]] = {}
        # Those in front of their lines, by the topic for whose sake they were set aside.
        self._fronts: dict[str, dict[str, Pending]] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, transaction_id: str) -> bool:
        return transaction_id in self._entries

    def is_behind(self, pending: Pending) -> bool:
        """Tell whether a transaction that was decided last must stay behind one that is set aside."""
        return bool(self._lines) and any(place in self._lines for place in _places(pending))

    def behind(self, pending: Pending) -> Pending | None:
        """Return a transaction that stands in front of one that is set aside, or None."""
        for place in _places(pending):
            first = next(iter(self._lines.get(place, {}).values()), None)
            if first is not None and first is not pending:
                return first
        return None

    def add(self, pending: Pending, topic: str | None) -> None:
        """Set a transaction aside, behind all that were before.

        It waits for the sake of a topic; None: it only stands behind others.
        """
        transaction_id = pending.half.transaction_id
        pending.held = True
        places = _places(pending)
        self._entries[transaction_id] = topic, places
        for place in places:
            self._lines.setdefault(place, OrderedDict())[transaction_id] = pending
        if topic is not None and self.behind(pending) is None:
            self._fronts.setdefault(topic, {})[transaction_id] = pending

    def remove(self, pending: Pending) -> list[Pending]:
        """Take a transaction out, wherever it stands; return those that were taken out with it, as nobody holds them.

        Those that stand in front now, and were set aside for a topic's sake, stay.
        """
        transaction_id = pending.half.transaction_id
        if transaction_id not in self._entries:
            return []
        freed: list[Pending] = []
        gone = [pending]
        while gone:
            one = gone.pop()
            for follower in self._take_out(one):
                topic = self._entries[follower.half.transaction_id][0]
                if topic is None:
                    freed.append(follower)
                    gone.append(follower)
                else:
                    self._fronts.setdefault(topic, {})[follower.half.transaction_id] = follower
        freed.sort(key=lambda one: (one.decided_at, one.decided_index))
        return freed

    def _take_out(self, pending: Pending) -> list[Pending]:
        """Take one transaction out; return those that are in front of all their lines by that."""
        transaction_id = pending.half.transaction_id
        pending.held = False
        topic, places = self._entries.pop(transaction_id)
        if topic is not None:
            fronts = self._fronts.get(topic, {})
            fronts.pop(transaction_id, None)
            if not fronts:
                self._fronts.pop(topic, None)
        followers: list[Pending] = []
        for place in places:
            line = self._lines.get(place)
            if line is None or line.pop(transaction_id, None) is None:
                continue
            if not line:
                del self._lines[place]
                continue
            first = next(iter(line.values()))
            if first not in followers and self.behind(first) is None:
                followers.append(first)
        return followers

    def refile(self, pending: Pending, topic: str) -> None:
        """Note that a transaction which is set aside waits for another topic's sake; it keeps its place."""
        transaction_id = pending.half.transaction_id
        former, places = self._entries[transaction_id]
        self._entries[transaction_id] = topic, places
        fronts = self._fronts.get(former or "", {})
        if fronts.pop(transaction_id, None) is not None:
            self._fronts.setdefault(topic, {})[transaction_id] = pending
        if not fronts:
            self._fronts.pop(former or "", None)

    def topics(self) -> list[str]:
        """Return the topics for whose sake something waits that could be tried."""
        return list(self._fronts)

    def fronts(self, topic: str) -> Iterator[Pending]:
        """Yield what could be tried for a topic's sake, in the order of the decisions but for few."""
        yield from self._fronts.get(topic, {}).values()

    def take(self, topic: str, most: int, leaves: Callable[[Pending], bool]) -> list[Pending]:
        """Return what is tried next for a topic's sake, in order; nothing changes.

        `leaves` tells whether one, and what stands behind it, is left out of this try.
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
        """Yield those behind a front that can go with it: a hot key does not wait for a transaction per message."""
        places = _places(front)
        if len(places) != 1:
            return
        line = iter(self._lines[places[0]].values())
        next(line)
        for follower in line:
            alone = len(_places(follower)) == 1
            if most <= 0 or not alone or follower.in_flight or leaves(follower) or follower.half.topic != topic:
                return
            most -= 1
            yield follower


def _places(pending: Pending) -> tuple[_Place, ...]:
    return pending.keys if pending.verdict is Verdict.COMMIT else ()
