"""What one shard's main path leaves out: topics that took nothing, or refused messages, and what must not pass those.

A Kafka transaction fails as a whole: so what was refused is tried apart from what is well. What is here is published by
trials only, or discarded. Two kinds of trials are never mixed: those that may well fail (one transaction of each
topic that took nothing, one refused one of each other topic, after pauses that grow) and all the rest, in their order.
Pure; times are monotonic seconds.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from penstock.transactions.faults import Fault
from penstock.transactions.outbound import Outcome, Publishable, lanes_of

#: Seconds between two tries of what was refused: at first, and at last.
_FIRST_PAUSE_S = 0.5
_LAST_PAUSE_S = 30.0
#: Seconds without a refusal after which a topic is published to with the others again: at first, and at last, since
#: each return that fails costs the others an abort. So long after it, its former refusals are forgotten.
_FIRST_PROBATION_S = 2.0
_LAST_PROBATION_S = 60.0
_FORGIVEN_S = 600.0
#: Transactions in one trial.
_AT_ONCE = 500
_NEVER = float("inf")


class Reason(NamedTuple):
    """Why a transaction is held.

    Attributes:
        why: in words, for operators: the broker's reason.
        behind: the name of the one before it in its key that it waits for; None where it was refused itself.
    """

    why: str
    behind: str | None = None


@dataclass(slots=True, eq=False)
class _Held:
    """A transaction that waits here. Its messages stay in the store."""

    name: str
    topics: tuple[str, ...]
    lanes: tuple[int, ...]
    reason: Reason
    #: Whether a broker refused its own messages, not all of their topic's.
    refused: bool = False
    #: When it was last tried as one that may fail.
    tried: float = 0.0
    #: Whether a trial has it.
    is_out: bool = False


@dataclass(slots=True, eq=False)
class _Topic:
    """A topic that refused something."""

    why: str = ""
    #: Whether the main path leaves it out; whether it takes nothing.
    is_aside: bool = False
    is_dead: bool = False
    #: When what it refused is tried again, and the pause after that.
    due: float = _NEVER
    pause: float = _FIRST_PAUSE_S
    #: When it may go back to the main path, if nothing is refused until then.
    back_at: float = 0.0
    probation: float = _FIRST_PROBATION_S
    held: dict[str, _Held] = field(default_factory=dict)


def _behind(before: _Held) -> Reason:
    why = before.reason.why if before.reason.behind is None else "which waits, too"
    return Reason(f"transaction {before.name}, before it in its key: {why}", before.name)


class Quarantine:
    """The topics and transactions of one shard that are tried apart. Used by one thread."""

    def __init__(self) -> None:
        # In the order in which they came, which is that of their decisions.
        self._held: dict[str, _Held] = {}
        self._topics: dict[str, _Topic] = {}
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

    def admit(self, entries: Sequence[Publishable]) -> tuple[Sequence[Publishable], dict[str, Reason]]:
        """Divide what is to be published.

        Args:
            entries: in their order.

        Returns:
            What goes with the healthy, and the names of what is held here from now on, each with the reason.
        """
        if not self._held and not any(topic.is_aside for topic in self._topics.values()):
            return entries, {}
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
        standing = self._held.get(entry.transaction_id)
        if standing is not None:
            return standing.reason
        for name in entry.topics:
            topic = self._topics.get(name)
            if topic is not None and topic.is_aside:
                return Reason(topic.why)
        for lane in lanes_of(entry):
            for before in self._lanes.get(lane, ()):
                return _behind(before)
        return None

    def _hold(self, entry: Publishable, reason: Reason) -> None:
        held = self._held.get(entry.transaction_id)
        if held is None:
            held = _Held(entry.transaction_id, entry.topics, lanes_of(entry), reason)
            self._held[held.name] = held
            for name in held.topics:
                self._topic(name).held[held.name] = held
            for lane in held.lanes:
                self._lanes.setdefault(lane, []).append(held)
            self._is_new = True
        held.reason = reason

    def _topic(self, name: str) -> _Topic:
        return self._topics.setdefault(name, _Topic())

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
            topic = self._topic(name)
            if not topic.is_aside:
                topic.is_aside = True
                topic.back_at = now + topic.probation
                topic.probation = min(2 * topic.probation, _LAST_PROBATION_S)
            topic.why, topic.is_dead = fault.why, fault.whole
            self._pause(topic, now)
            self._is_new = True

    def _pause(self, topic: _Topic, now: float) -> None:
        topic.due = now + topic.pause
        topic.pause = min(2 * topic.pause, _LAST_PAUSE_S)

    def next_trial(self, now: float) -> list[str]:
        """Return the names of what to try now, in their order; each is out until `tried`, `give_back` or `remove`."""
        self._return_topics(now)
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
            if held.is_out or held.refused or self._is_for_dead(held) or not self._may_go(held, names):
                continue
            chosen.append(held)
            names.add(held.name)
            if len(chosen) == _AT_ONCE:
                break
        return chosen

    def _risky(self, now: float) -> list[_Held]:
        """Choose one for each topic whose pause is over: the one that was not tried for longest."""
        chosen: dict[str, _Held] = {}
        for topic in self._topics.values():
            if topic.due > now:
                continue
            candidates = [
                held
                for held in topic.held.values()
                if (topic.is_dead or held.refused) and not held.is_out and self._may_go(held, ())
            ]
            if candidates:
                held = min(candidates, key=lambda one: one.tried)
                held.tried = now
                chosen[held.name] = held
                # Until the trial tells.
                topic.due = now + topic.pause
            else:
                topic.due = _NEVER if not topic.held else now + topic.pause
        return [held for name, held in self._held.items() if name in chosen] if len(chosen) > 1 else [*chosen.values()]

    def _is_for_dead(self, held: _Held) -> bool:
        return any(self._topics[name].is_dead for name in held.topics if name in self._topics)

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
            for topic in () if held is None or not held.tried else map(self._topic, held.topics):
                if topic.is_dead:
                    topic.is_dead, topic.back_at = False, now + topic.probation
                # It takes messages: what it refused is tried at once.
                topic.pause, topic.due = _FIRST_PAUSE_S, now
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
                held.reason = still[name] = held.reason if before is None else _behind(before)
            else:
                held.reason = still[name] = Reason(why)
                if not any(topic in outcome.faults for topic in held.topics):
                    self._refuse(held, now)
        self._is_new = True
        return still

    def _refuse(self, held: _Held, now: float) -> None:
        held.refused, held.tried = True, now
        for name in held.topics:
            topic = self._topic(name)
            topic.why = topic.why or held.reason.why
            topic.back_at = max(topic.back_at, now + topic.probation)
            self._pause(topic, now)

    def give_back(self, names: Iterable[str]) -> None:
        """Take back what a trial had, whose end is known, without a result."""
        for name in names:
            held = self._held.get(name)
            if held is not None:
                held.is_out = False
                self._is_new = True

    def remove(self, names: Iterable[str]) -> None:
        """Let go of what was published or discarded: what waited behind it is free."""
        for name in names:
            held = self._held.pop(name, None)
            if held is None:
                continue
            for topic in held.topics:
                self._topics[topic].held.pop(name, None)
            for lane in held.lanes:
                left = self._lanes[lane]
                left.remove(held)
                if not left:
                    del self._lanes[lane]
            self._is_new = True

    def _return_topics(self, now: float) -> None:
        """Let topics go back to the main path that refused nothing for a while, and forget those that are well."""
        for name, topic in list(self._topics.items()):
            if topic.is_aside and not topic.is_dead and now >= topic.back_at:
                # What is held of it goes by trials still, and keeps what must not pass it.
                topic.is_aside = False
            if not topic.is_aside and not topic.held and now > topic.back_at + _FORGIVEN_S:
                del self._topics[name]

    def wait_s(self, now: float) -> float:
        """Return the seconds until a trial is due; 0 if one is now."""
        if self._is_new and self._held:
            return 0.0
        due = min((topic.due for topic in self._topics.values() if topic.held), default=_NEVER)
        return max(0.0, due - now)


__all__ = ["Quarantine", "Reason"]
