"""What one shard's main path leaves out: topics that took nothing, or refused messages, and what must not pass those.

A Kafka transaction fails as a whole: so what was refused is tried apart from what is well. What is here is published by
trials only, or discarded; when a topic is tried, and for how long it stays apart, `target_quarantine` decides. Two
kinds of trials are never mixed: those that may well fail (one transaction of each topic that took nothing, one refused
one of each other topic) and all the rest, in their order. Pure; times are monotonic seconds.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from penstock.clients.transactional.faults import Fault
from penstock.transactions.stores.relay.publishable import Outcome, Publishable, lanes_of
from penstock.transactions.writing.target_quarantine import TargetQuarantine

#: Transactions in one trial.
_AT_ONCE = 500


class Reason(NamedTuple):
    """Why a transaction is held."""

    #: In words, for operators: the broker's reason.
    why: str
    #: The name of the one before it in its key that it waits for; None where it was refused itself.
    behind: str | None = None


@dataclass(slots=True, eq=False)
class _Held:
    """A transaction that waits here. Its messages stay in the store."""

    name: str
    topics: tuple[str, ...]
    lanes: tuple[int, ...]
    reason: Reason
    #: Where it counts as refused, if a broker refused its own messages, not all of their topic's.
    refused_by: str | None = None
    #: When it was last tried as one that may fail.
    tried: float = 0.0
    #: Whether a trial has it.
    is_out: bool = False


def _behind(before: _Held) -> Reason:
    why = before.reason.why if before.reason.behind is None else "which waits, too"
    return Reason(f"transaction {before.name}, before it in its key: {why}", before.name)


class Quarantine:
    """The topics and transactions of one shard that are tried apart. Used by one thread."""

    def __init__(self) -> None:
        # In the order in which they came, which is that of their decisions.
        self._held: dict[str, _Held] = {}
        self._by_topic: dict[str, dict[str, _Held]] = {}
        self._targets = TargetQuarantine()
        # What is held, by lane, in its order.
        self._lanes: dict[int, list[_Held]] = {}
        # Whether something may be free to go that was not looked at since.
        self._is_new = False

    def __contains__(self, name: object) -> bool:
        return name in self._held

    @property
    def is_empty(self) -> bool:
        """Whether nothing waits here."""
        return not self._held

    def admit(self, entries: Sequence[Publishable], now: float) -> tuple[Sequence[Publishable], dict[str, Reason]]:
        """Divide what is to be published: what goes with the healthy, and by name why the rest is held from now on."""
        if not self._held and not self._targets:
            return entries, {}
        # What is held of those that go back to the main path goes by trials still, and keeps what must not pass it.
        self._targets.release(lambda _: False, now)
        go: list[Publishable] = []
        stopped: dict[str, Reason] = {}
        for entry in entries:
            reason = self._obstacle(entry)
            if reason is None:
                go.append(entry)
            else:
                stopped[entry.transaction_id] = reason
                self._hold(entry, reason)
        return go, stopped

    def _obstacle(self, entry: Publishable) -> Reason | None:
        held = self._held.get(entry.transaction_id)
        if held is not None:
            return held.reason
        if (dead := self._dead_topic(entry.topics)) is not None:
            return dead
        # Of a topic that refuses single messages, what stands behind one of its key is not tried before that one.
        for lane in lanes_of(entry):
            for before in self._lanes.get(lane, ()):
                return _behind(before)
        suspect = next(filter(self._targets.is_out, entry.topics), None)
        return None if suspect is None else Reason(self._targets.why(suspect))

    def _dead_topic(self, topics: Sequence[str]) -> Reason | None:
        """Return why one of these topics takes nothing, or None."""
        dead = next(filter(self._targets.takes_nothing, topics), None)
        return None if dead is None else Reason(self._targets.why(dead))

    def _hold(self, entry: Publishable, reason: Reason) -> None:
        held = self._held.get(entry.transaction_id)
        if held is None:
            held = _Held(entry.transaction_id, entry.topics, lanes_of(entry), reason)
            self._held[held.name] = held
            for name in held.topics:
                self._by_topic.setdefault(name, {})[held.name] = held
            for lane in held.lanes:
                self._lanes.setdefault(lane, []).append(held)
            self._is_new = True
        held.reason = reason

    def main_ended(self, entries: Sequence[Publishable], outcome: Outcome, now: float) -> dict[str, Reason]:
        """Take in what became of a publication on the main path; return what is held here now, each with the reason."""
        self.blame(outcome.faults, now)
        stopped: dict[str, Reason] = {}
        published, held = set(outcome.published), set(outcome.held)
        for entry in entries:
            name = entry.transaction_id
            if entry.discards is not None and name in published:
                self.remove([entry.discards])
            # What was held back because brokers have trouble is tried again by the main path.
            why = outcome.refused.get(name)
            reason = Reason(why) if why is not None else self._obstacle(entry) if name in held else None
            if reason is not None:
                stopped[name] = reason
                self._hold(entry, reason)
        return stopped

    def blame(self, faults: Mapping[str, Fault], now: float) -> None:
        """Leave topics out of the main path."""
        for name, fault in faults.items():
            was_out = self._targets.is_out(name)
            if fault.whole:
                self._targets.fail(name, fault.why, now)
            else:
                self._targets.suspect(name, fault.why, now)
            if not was_out:
                self._targets.watch(name, now)
            self._is_new = True

    def next_trial(self, now: float) -> list[str]:
        """Return the names of what to try now, in their order; each is out until `tried`, `give_back` or `remove`."""
        chosen = self._free() if self._is_new else []
        if not chosen:
            self._is_new = False
            chosen = self._risky(now)
        for held in chosen:
            held.is_out = True
        return [held.name for held in chosen]

    def _free(self) -> list[_Held]:
        """Choose what stands behind nothing that was refused, and is for topics that take messages."""
        chosen: list[_Held] = []
        names: set[str] = set()
        for held in self._held.values():
            may_fail = self._is_refused(held) or any(map(self._targets.takes_nothing, held.topics))
            if held.is_out or may_fail or not self._may_go(held, names):
                continue
            chosen.append(held)
            names.add(held.name)
            if len(chosen) == _AT_ONCE:
                break
        return chosen

    def _risky(self, now: float) -> list[_Held]:
        """Choose one for each topic whose pause is over: the one that was not tried for longest."""
        chosen: dict[str, _Held] = {}
        for topic, waiting in self._by_topic.items():
            if self._targets.due(topic) > now:
                continue
            # Until the trial tells.
            self._targets.postpone(topic, now)
            is_dead = self._targets.takes_nothing(topic)
            candidates = [
                held
                for held in waiting.values()
                if (is_dead or held.refused_by == topic) and not held.is_out and self._may_go(held, ())
            ]
            if candidates:
                held = min(candidates, key=lambda one: one.tried)
                held.tried = now
                chosen[held.name] = held
        return [held for name, held in self._held.items() if name in chosen] if len(chosen) > 1 else [*chosen.values()]

    def _is_refused(self, held: _Held) -> bool:
        # Where one that was refused is published, all of its topic are as good as new.
        return held.refused_by is not None and self._targets.is_refused(held.name)

    def _may_go(self, held: _Held, chosen: Container[str]) -> bool:
        """Tell whether nothing is before it in its lanes but what goes with it."""
        for lane in held.lanes:
            for before in self._lanes[lane]:
                if before is held:
                    break
                if before.name not in chosen:
                    return False
        return True

    def _before(self, held: _Held) -> _Held | None:
        """Return what a transaction waits for, by its keys."""
        return next((first for lane in held.lanes if (first := self._lanes[lane][0]) is not held), None)

    def tried(self, outcome: Outcome, now: float) -> dict[str, Reason]:
        """Take in what became of a trial; return what is still held of it, each with the reason."""
        for name in outcome.published:
            held = self._held.get(name)
            for topic in () if held is None else held.topics:
                self._targets.succeeded(topic, [name], now)
        self.remove(outcome.published)
        self.blame(outcome.faults, now)
        still: dict[str, Reason] = {}
        # What was refused first: others wait for it.
        for name in (*outcome.refused, *outcome.held):
            held = self._held.get(name)
            if held is None:
                continue
            held.is_out = False
            why = outcome.refused.get(name)
            if why is None:
                before = self._before(held)
                behind = held.reason if before is None else _behind(before)
                held.reason = still[name] = self._dead_topic(held.topics) or behind
            else:
                held.reason = still[name] = Reason(why)
                if not any(topic in outcome.faults for topic in held.topics):
                    self._refuse(held, now)
        self._is_new = True
        return still

    def _refuse(self, held: _Held, now: float) -> None:
        held.tried = now
        # Of several messages nobody knows which it was: one of a topic that refused something before.
        held.refused_by = next(filter(self._targets.is_out, held.topics), held.topics[0])
        # One that is refused again says nothing new of its topic, whose other messages need not stay apart for it.
        self._targets.refuse(held.name, held.refused_by, held.reason.why, now, stays=False)

    def give_back(self, names: Iterable[str]) -> None:
        """Take back what a trial had, whose end is known, without a result."""
        for name in names:
            held = self._held.get(name)
            if held is not None:
                held.is_out = False
                self._is_new = True

    def remove(self, names: Iterable[str]) -> None:
        """Remove what was published or discarded: what waited behind it is free."""
        for name in names:
            held = self._held.pop(name, None)
            self._targets.forget(name)
            if held is None:
                continue
            for topic in held.topics:
                waiting = self._by_topic[topic]
                waiting.pop(name, None)
                if not waiting:
                    del self._by_topic[topic]
            for lane in held.lanes:
                left = self._lanes[lane]
                left.remove(held)
                if not left:
                    del self._lanes[lane]
            self._is_new = True

    def wait_s(self, now: float) -> float:
        """Return the seconds until a trial is due; 0 if one is now."""
        if self._is_new and self._held:
            return 0.0
        due = min(map(self._targets.due, self._by_topic), default=float("inf"))
        return max(0.0, due - now)
