"""Topics that take nothing now, and transactions that were refused: what is tried apart from the others, and when.

Pure: the caller gives the time, in monotonic seconds. A Kafka transaction fails as a whole, so whatever failed once is
left out of the common ones. A topic in quarantine has all its messages tried apart; one that refused single messages
stays there for a while after the last refusal, longer each time, so that the next refusal costs nobody else anything.
Refused ones are tried again one at a time and alone, however many there are.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable
from dataclasses import dataclass

#: Seconds until what failed is tried again: at first, and at last.
_MIN_RETRY_DELAY_S = 0.5
_MAX_RETRY_DELAY_S = 30.0
#: Seconds that a topic stays in quarantine after a refusal: at first, and at last.
_FIRST_PROBATION_S = 5.0
_LAST_PROBATION_S = 300.0
#: Transactions that are tried together: at first after a failure of the whole topic, and at most.
_ONE = 1
_MOST = 500
_GROWTH = 8
#: Seconds after which what a topic did is forgotten.
_FORGET_S = 900.0


@dataclass(slots=True)
class _Topic:
    """A topic in quarantine, or that was there a while ago."""

    why: str
    #: Not tried before.
    until: float
    pause_s: float
    #: Transactions that are tried together.
    width: int
    #: In quarantine until then at least; how long the next refusal keeps it.
    out_until: float
    probation_s: float
    is_out: bool = True
    #: Whether a try is under way.
    is_tried: bool = False
    #: No refused one is tried again before, and the pause after that.
    retry_at: float = 0.0
    retry_s: float = 0.0


@dataclass(slots=True)
class _Refusal:
    """A transaction that the broker refused."""

    why: str
    topic: str
    #: When it was tried last.
    tried_at: float


class TargetQuarantine:
    """What is out. Used by one thread; others read copies: `reasons` and `refusing`."""

    def __init__(self) -> None:
        self._topics: dict[str, _Topic] = {}
        self._refused: dict[str, _Refusal] = {}

    def is_out(self, topic: str) -> bool:
        """Tell whether messages to a topic are left out of the common transactions."""
        found = self._topics.get(topic)
        return found is not None and found.is_out

    def __bool__(self) -> bool:
        return bool(self._topics) or bool(self._refused)

    def suspect(self, topic: str, why: str, now: float) -> None:
        """Have a topic tried apart, at once: something failed, and it may be its fault."""
        found = self._enter(topic, why, now)
        found.until = now

    def fail(self, topic: str, why: str, now: float) -> float:
        """Take in that a topic took nothing; return the seconds until it is tried again."""
        found = self._enter(topic, why, now)
        found.why = why
        found.pause_s = min(_MAX_RETRY_DELAY_S, 2 * found.pause_s) if found.pause_s else _MIN_RETRY_DELAY_S
        found.until = now + found.pause_s
        found.width = _ONE
        return found.pause_s

    def passed(self, topic: str, why: str, now: float) -> None:
        """Take in that a topic took nothing for a reason that holds no more."""
        found = self._topics.get(topic)
        if found is not None and found.pause_s and found.why == why:
            found.why = next((refusal.why for refusal in self._refused.values() if refusal.topic == topic), "")
            found.pause_s, found.until = 0.0, now

    def refuse(self, transaction_id: str, topic: str, why: str, now: float) -> bool:
        """Take in that the broker refused a transaction; tell whether this is the first time.

        One that is refused again says nothing new of its topic, whose other messages need not stay apart for it.
        """
        is_first = transaction_id not in self._refused
        found = self._topics.get(topic)
        if found is None or is_first:
            found = self._enter(topic, why, now)
            found.why = found.why or why
            self._prolong(found, now)
        if not is_first or not found.retry_s:
            found.retry_s = min(_MAX_RETRY_DELAY_S, 2 * found.retry_s) if found.retry_s else _MIN_RETRY_DELAY_S
            found.retry_at = now + found.retry_s
        self._refused[transaction_id] = _Refusal(why, topic, now)
        return is_first

    def watch(self, topic: str, now: float) -> None:
        """Keep a topic out for a while, longer each time: its return, if that fails, costs others something."""
        found = self._topics.get(topic)
        if found is not None:
            self._prolong(found, now)

    def _prolong(self, found: _Topic, now: float) -> None:
        if found.out_until <= now:
            found.probation_s = min(_LAST_PROBATION_S, 2 * found.probation_s)
        found.out_until = now + found.probation_s

    def why(self, topic: str) -> str:
        """Return why a topic is in quarantine, or was."""
        found = self._topics.get(topic)
        return "" if found is None else found.why

    def succeeded(self, topic: str, published: Iterable[str], now: float) -> None:
        """Take in that transactions tried for a topic's sake were published."""
        found = self._topics.get(topic)
        if found is None:
            return
        found.pause_s = 0.0
        found.until = now
        found.width = min(_MOST, found.width * _GROWTH)
        if any(name in self._refused for name in published):
            # The cause is gone, as it seems: what was refused is as good as new.
            found.retry_s, found.retry_at = 0.0, 0.0
            for name in [name for name, refusal in self._refused.items() if refusal.topic == topic]:
                del self._refused[name]

    def try_now(self, topic: str, now: float) -> None:
        """Let a topic be tried at once: it may have come back."""
        found = self._topics.get(topic)
        if found is not None:
            found.until = min(found.until, now)

    def is_refused(self, transaction_id: str) -> bool:
        """Tell whether a transaction was refused, and is tried alone."""
        return transaction_id in self._refused

    def why_refused(self, transaction_id: str) -> str | None:
        """Return why a transaction was refused, or None."""
        refusal = self._refused.get(transaction_id)
        return None if refusal is None else refusal.why

    def retries(self, topic: str, now: float) -> bool:
        """Tell whether a refused one of a topic is to be tried again."""
        found = self._topics.get(topic)
        return found is not None and found.retry_at <= now and bool(self._refused)

    def tried_at(self, transaction_id: str) -> float:
        """Return when a refused one was tried last."""
        refusal = self._refused.get(transaction_id)
        return 0.0 if refusal is None else refusal.tried_at

    def forget(self, transaction_id: str) -> None:
        """A transaction is settled."""
        self._refused.pop(transaction_id, None)

    def next_topic(self, waiting: Collection[str], now: float) -> str | None:
        """Return the topic to try next, or None: the one that has waited longest since its time came."""
        due = [(self._until(topic), topic) for topic in waiting]
        chosen = min((entry for entry in due if entry[0] <= now), default=None)
        return None if chosen is None else chosen[1]

    def _until(self, topic: str) -> float:
        found = self._topics.get(topic)
        if found is None:
            return float("-inf")
        return float("inf") if found.is_tried else found.until

    def begin_try(self, topic: str, now: float) -> int:
        """Note that a try is under way; return how many transactions to try together."""
        found = self._topics.get(topic)
        if found is None:
            # Something of it waits that was refused; the topic itself is well.
            found = self._topics[topic] = _Topic("", now, 0.0, _MOST, now, _FIRST_PROBATION_S, is_out=False)
        found.is_tried = True
        return found.width

    def end_try(self, topic: str) -> None:
        """Note that it has ended."""
        found = self._topics.get(topic)
        if found is not None:
            found.is_tried = False

    def postpone(self, topic: str, now: float) -> None:
        """There is nothing to try for a topic now."""
        found = self._topics.get(topic)
        if found is not None:
            found.until = max(found.until, now + _MIN_RETRY_DELAY_S / 2)
            found.retry_at = max(found.retry_at, now + _MIN_RETRY_DELAY_S / 2)

    def release(self, has_work: Callable[[str], bool], waiting: Container[str], now: float) -> list[str]:
        """Let out those topics that are well again, and return them.

        `has_work` tells whether something waits for a topic's sake that was not refused; in `waiting` are those for
        whose sake anything does. One that took nothing, and is tried no more since nothing waits for it, may be well.
        """
        well = []
        for topic, found in list(self._topics.items()):
            if found.is_out and not found.is_tried and now >= found.out_until:
                may_be_well = not found.pause_s or (topic not in waiting and now >= found.until)
                if may_be_well and not has_work(topic):
                    found.is_out, found.pause_s = False, 0.0
                    well.append(topic)
            elif not found.is_out and not found.is_tried and now >= found.out_until + _FORGET_S:
                del self._topics[topic]
        return well

    def reasons(self) -> dict[str, str]:
        """Return the topics that take nothing, each with the reason; not those that refused single messages."""
        return {topic: found.why for topic, found in self._topics.copy().items() if found.is_out and found.pause_s}

    def refusing(self) -> dict[str, str]:
        """Return the topics that refused what is pending still, each with the first such transaction and the reason."""
        refused = reversed(self._refused.copy().items())
        return {refusal.topic: f"it refuses transaction {name}: {refusal.why}" for name, refusal in refused}

    def _enter(self, topic: str, why: str, now: float) -> _Topic:
        found = self._topics.get(topic)
        if found is None:
            found = self._topics[topic] = _Topic(why, now, 0.0, _ONE, now, _FIRST_PROBATION_S / 2)
        elif not found.is_out:
            found.is_out, found.why, found.width = True, why, _ONE
        return found
