"""Quarantine: topics and transactions that are tried separately from the others, and when.

Pure: the caller gives the time, in monotonic seconds. A Kafka transaction fails as a whole, so the cause of a failure
is kept out of the common Kafka transactions. All messages to a topic in quarantine are tried separately. A topic that
refused single messages stays in quarantine for a while, longer each time, so that its next refusal delays no other
topic. Refused transactions are tried again one at a time and alone, however many there are.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable
from dataclasses import dataclass

#: Seconds until a failure is tried again: the first and the longest delay.
_MIN_RETRY_DELAY_S = 0.5
_MAX_RETRY_DELAY_S = 30.0
#: Seconds that a topic stays in quarantine after a refusal: the first and the longest.
_FIRST_PROBATION_S = 5.0
_LAST_PROBATION_S = 300.0
#: Transactions in one trial: after a failure of the whole topic, and at most; each success multiplies them.
_MIN_WIDTH = 1
_MAX_WIDTH = 500
_WIDTH_GROWTH = 8
#: Seconds after which a topic's failures are forgotten.
_FORGET_S = 900.0


@dataclass(slots=True)
class _Topic:
    """A topic that is in quarantine, or was not long ago."""

    why: str
    #: The earliest time of the next trial, and the delay after a failed one.
    until: float
    pause_s: float
    #: Transactions in one trial.
    width: int
    #: The earliest time of leaving quarantine, and by how much the next refusal prolongs it.
    out_until: float
    probation_s: float
    is_out: bool = True
    #: Whether a trial is under way.
    is_tried: bool = False
    #: The earliest time of the next trial of a refused transaction, and the delay after it.
    retry_at: float = 0.0
    retry_s: float = 0.0


@dataclass(slots=True)
class _Refusal:
    """A transaction that the broker refused."""

    why: str
    topic: str
    #: The time of its last trial.
    tried_at: float


class TargetQuarantine:
    """The topics in quarantine and the refused transactions of one engine.

    One thread uses it. Other threads read only `reasons` and `refusing`, which copy first.
    """

    def __init__(self) -> None:
        self.topics: dict[str, _Topic] = {}
        self._refused: dict[str, _Refusal] = {}

    def is_out(self, topic: str) -> bool:
        """Tell whether messages to a topic are kept out of the common Kafka transactions."""
        state = self.topics.get(topic)
        return state is not None and state.is_out

    def __bool__(self) -> bool:
        return bool(self.topics) or bool(self._refused)

    def suspect(self, topic: str, why: str, now: float) -> None:
        """Put a topic in quarantine and try it at once: it may be the cause of a failure."""
        state = self._enter(topic, why, now)
        state.until = now

    def fail(self, topic: str, why: str, now: float) -> float:
        """Note that a topic took no message. Return the seconds until the next trial."""
        state = self._enter(topic, why, now)
        state.why = why
        state.pause_s = min(_MAX_RETRY_DELAY_S, max(_MIN_RETRY_DELAY_S, 2 * state.pause_s))
        state.until = now + state.pause_s
        state.width = _MIN_WIDTH
        return state.pause_s

    def passed(self, topic: str, why: str, now: float) -> None:
        """Note that the reason for which a topic took no message no longer holds."""
        state = self.topics.get(topic)
        if state is not None and state.pause_s and state.why == why:
            state.why = next((refusal.why for refusal in self._refused.values() if refusal.topic == topic), "")
            state.pause_s, state.until = 0.0, now

    def refuse(self, transaction_id: str, topic: str, why: str, now: float) -> bool:
        """Note that the broker refused a transaction. Tell whether it is the first time.

        A repeated refusal says nothing new about the topic: its other messages need not stay in quarantine for it.
        """
        is_first = transaction_id not in self._refused
        state = self.topics.get(topic)
        if state is None or is_first:
            state = self._enter(topic, why, now)
            state.why = state.why or why
            self.watch(topic, now)
        if not is_first or not state.retry_s:
            state.retry_s = min(_MAX_RETRY_DELAY_S, max(_MIN_RETRY_DELAY_S, 2 * state.retry_s))
            state.retry_at = now + state.retry_s
        self._refused[transaction_id] = _Refusal(why, topic, now)
        return is_first

    def watch(self, topic: str, now: float) -> None:
        """Keep a topic in quarantine for a while, longer each time: a failure after its return delays others."""
        state = self.topics[topic]
        if state.out_until <= now:
            state.probation_s = min(_LAST_PROBATION_S, 2 * state.probation_s)
        state.out_until = now + state.probation_s

    def why(self, topic: str) -> str:
        """Return why a topic is or was in quarantine."""
        state = self.topics.get(topic)
        return "" if state is None else state.why

    def succeeded(self, topic: str, published: Iterable[str], now: float) -> None:
        """Note that a trial for a topic published these transactions."""
        state = self.topics.get(topic)
        if state is None:
            return
        state.pause_s = 0.0
        state.until = now
        state.width = min(_MAX_WIDTH, state.width * _WIDTH_GROWTH)
        if any(name in self._refused for name in published):
            # A refused one went through, so the cause is probably gone: forget the topic's other refusals.
            state.retry_s, state.retry_at = 0.0, 0.0
            for name in [name for name, refusal in self._refused.items() if refusal.topic == topic]:
                del self._refused[name]

    def try_now(self, topic: str, now: float) -> None:
        """Try a topic at once: it may have come back."""
        state = self.topics.get(topic)
        if state is not None:
            state.until = min(state.until, now)

    def is_refused(self, transaction_id: str) -> bool:
        """Tell whether a transaction was refused: it is tried alone."""
        return transaction_id in self._refused

    def why_refused(self, transaction_id: str) -> str | None:
        """Return why a transaction was refused, or None."""
        refusal = self._refused.get(transaction_id)
        return None if refusal is None else refusal.why

    def retries(self, topic: str, now: float) -> bool:
        """Tell whether a refused transaction of a topic may be tried again."""
        state = self.topics.get(topic)
        return state is not None and state.retry_at <= now and bool(self._refused)

    def tried_at(self, transaction_id: str) -> float:
        """Return the time of the last trial of a refused transaction."""
        return self._refused[transaction_id].tried_at

    def forget(self, transaction_id: str) -> None:
        """Forget a settled transaction."""
        self._refused.pop(transaction_id, None)

    def next_topic(self, waiting: Collection[str], now: float) -> str | None:
        """Return the topic to try next, or None: the one whose trial has been due for longest."""
        due = [(self._until(topic), topic) for topic in waiting]
        chosen = min((entry for entry in due if entry[0] <= now), default=None)
        return None if chosen is None else chosen[1]

    def _until(self, topic: str) -> float:
        state = self.topics.get(topic)
        if state is None:
            return float("-inf")
        return float("inf") if state.is_tried else state.until

    def begin_try(self, topic: str, now: float) -> int:
        """Note that a trial begins. Return how many transactions to try together."""
        state = self.topics.get(topic)
        if state is None:
            # Something refused waits for it; the topic itself is well.
            state = self.topics[topic] = _Topic("", now, 0.0, _MAX_WIDTH, now, _FIRST_PROBATION_S, is_out=False)
        state.is_tried = True
        return state.width

    def end_try(self, topic: str) -> None:
        """Note that a trial has ended."""
        state = self.topics.get(topic)
        if state is not None:
            state.is_tried = False

    def postpone(self, topic: str, now: float) -> None:
        """Try a topic a little later: there is nothing to try now."""
        state = self.topics.get(topic)
        if state is not None:
            state.until = max(state.until, now + _MIN_RETRY_DELAY_S / 2)
            state.retry_at = max(state.retry_at, now + _MIN_RETRY_DELAY_S / 2)

    def release(self, has_work: Callable[[str], bool], waiting: Container[str], now: float) -> list[str]:
        """Let topics that are well again leave quarantine. Return them.

        `has_work` tells whether anything that was not refused waits for a topic. `waiting` holds the topics that
        anything waits for. A topic that failed and that nothing waits for is no longer tried: it may be well.
        """
        released = []
        for topic, state in list(self.topics.items()):
            if state.is_out and not state.is_tried and now >= state.out_until:
                may_be_well = not state.pause_s or (topic not in waiting and now >= state.until)
                if may_be_well and not has_work(topic):
                    state.is_out, state.pause_s = False, 0.0
                    released.append(topic)
            elif not state.is_out and not state.is_tried and now >= state.out_until + _FORGET_S:
                del self.topics[topic]
        return released

    def reasons(self) -> dict[str, str]:
        """Return the topics that take no message, each with the reason; not those that refused single messages."""
        return {topic: state.why for topic, state in self.topics.copy().items() if state.is_out and state.pause_s}

    def refusing(self) -> dict[str, str]:
        """Return the topics that refused pending transactions, each with the first of them and the reason."""
        refused = reversed(self._refused.copy().items())
        return {refusal.topic: f"it refuses transaction {name}: {refusal.why}" for name, refusal in refused}

    def _enter(self, topic: str, why: str, now: float) -> _Topic:
        state = self.topics.get(topic)
        if state is None:
            state = self.topics[topic] = _Topic(why, now, 0.0, _MIN_WIDTH, now, _FIRST_PROBATION_S / 2)
        elif not state.is_out:
            state.is_out, state.why, state.width = True, why, _MIN_WIDTH
        return state
