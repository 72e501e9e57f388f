"""Why a partition does not move: what holds its watermark, where that message is, and since when."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from typing import Any

from penstock.consumer.assignments import Assignment, ConsumerParked, Fetch, PauseReason
from penstock.consumer.execution_slot import ExecutionSlot, complete_finished
from penstock.consumer.failures.parking import NotDue
from penstock.consumer.handlers.call_guard import AbandonedCall
from penstock.consumer.handlers.handler import Handler
from penstock.consumer.handlers.options.ordering import key_of
from penstock.consumer.inspection.causes import Causes, EarlierCall, Place, calls_ahead, parked_ahead
from penstock.consumer.inspection.parked_keys import head_of, state_of
from penstock.consumer.inspection.statistics import PartitionStatistics, partition_statistics
from penstock.message import Record
from penstock.routing import KeyState, Scheduler

#: The state of a partition of which it is not known where the group stands.
UNKNOWN = "position not known yet"
#: The state of a message that waits for a call which another message began.
BEHIND_CALL = "behind a call"
#: What is added for a key that its handler holds.
_HELD = "its tries are exhausted, and its handler holds it; mend the cause and start the app again"


@dataclass(frozen=True, slots=True)
class Explanation(PartitionStatistics):
    """One assigned partition at one moment.

    The counts are those of its statistics. `partition` is -1 where the group does not take this member, and `paused`
    says why.

    Attributes:
        handler: name of its handler.
        gaps: ranges of offsets done above the watermark.
        blocking_offset: the offset that holds the watermark, or None where nothing is in flight.
        state: where that message is: "idle", "in handler", "parked", "put off" (a deferred completion is out),
            "held" (its tries are exhausted, by `on_failure="hold"`),
            "dead letter" (on its way to another topic), "queued", "behind its key", "behind a call" (an earlier one of
            its key or lane has not returned), "held by rate", or "shut out" where
            the group does not take this member and "no partition" where it gives it none; "no topic" of a pattern
            that no topic matches, which stands for the topic, and of a topic that matches and cannot be consumed;
            "position not known yet" where the group has no offset, or none was fetched, and no message came.
        key: what the messages that wait for it have in common with it; bytes for a key. Not part of `repr` or `str`.
        attempt: how often it was tried before.
        age: seconds in the handler, or of the call that it waits for, or since its first try when it is parked; None
            elsewhere.
        due_in: seconds until its next try, when it is parked; None where there is none by the clock.
        rate: messages/s that its handler may begin, when that is what it waits for.
        worker: name of the thread or task that has it, or the call that it waits for.
        detail: what it waits for beside that: for a dead letter, the topic and the broker's words; for a message behind
            a parked one of its key, the place of that, in whatever topic.
        trouble: what is wrong with the topic: it does not exist, no broker answers, another's open transaction is in
            the way, or which right is missing and what gives it; or None.
        over_time_limit: how often its handler was over its time limit with it, a call under way included.
    """

    handler: str
    gaps: int = 0
    blocking_offset: int | None = None
    state: str = "idle"
    key: object = field(default=None, repr=False)
    attempt: int = 0
    age: float | None = None
    due_in: float | None = None
    rate: float | None = None
    worker: str | None = None
    detail: str | None = None
    trouble: str | None = None
    over_time_limit: int = 0

    def __str__(self) -> str:
        if self.partition < 0:
            besides = "" if self.trouble in (None, self.paused) else f"; {self.trouble}"
            return f"{self.topic}: no partition; {self.paused}{besides}"
        place = f"{self.topic}[{self.partition}]"
        besides = "" if self.paused is None else f", paused ({self.paused})"
        besides += "" if self.trouble is None else f", {self.trouble}"
        if self.state == UNKNOWN:
            return f"{place}: {UNKNOWN}{besides}"
        lag = "unknown" if self.lag is None else str(self.lag)
        text = f"{place}: lag {lag}, watermark {self.watermark}, {self.in_flight} in flight"
        text += f" ({self.bytes_in_flight} bytes), {self.gaps} gaps{besides}"
        return text if self.blocking_offset is None else f"{text}; held by {self._holder()}"

    def _holder(self) -> str:
        """Say what holds the watermark."""
        text = f"offset {self.blocking_offset}, {self.state}"
        if self.state == BEHIND_CALL:
            return f"offset {self.blocking_offset}, queued {self.detail}"
        if self.worker is not None:
            text += f" {self.handler} on {self.worker}"
        else:
            text += f" ({self.handler})" if self.rate is None else f" {self.rate:g}/s ({self.handler})"
        if self.age is not None:
            text += f" for {self.age:.1f} s"
        if self.attempt:
            text += f" after {self.attempt} failed tries"
        if self.over_time_limit:
            text += f", over its time limit, {self.over_time_limit} time{'s' if self.over_time_limit > 1 else ''}"
        if self.due_in is not None:
            text += f", next try in {self.due_in:.1f} s"
        if self.detail is not None:
            text += f": {self.detail}"
        return text


def explain(
    assignments: Sequence[Assignment],
    slots: Iterable[ExecutionSlot],
    scheduler: Scheduler[Fetch, Record],
    now: float,
    causes: Causes,
) -> list[Explanation]:
    """Return an explanation of each assignment, from live state. Any thread; the answer is of about one moment."""
    slots = list(slots)
    complete_finished(slots)
    in_handler = {}
    for slot in slots:
        record, fetch = slot.record, slot.fetch
        if record is not None and fetch is not None:
            in_handler[fetch.assignment, record.offset()] = slot
    parked_heads = {}
    for lane in scheduler.lanes:
        # A copy, made in one step: the holder changes the dictionary meanwhile. A list of items is not, for the
        # collector may run at any tuple of it.
        for key, parked in lane.parked.copy().items() if lane.parked else ():
            head = head_of(parked)
            if head is not None:
                parked_heads[head[0].assignment, head[2].offset()] = (key, parked)
    found = [_explain(assignment, in_handler, parked_heads, now) for assignment in assignments]
    queued = {
        (assignment, explanation.blocking_offset)
        for assignment, explanation in zip(assignments, found, strict=True)
        if explanation.state == "queued" and explanation.blocking_offset is not None
    }
    ahead, calls = parked_ahead(scheduler, queued), calls_ahead(slots, queued)
    return [
        _with_causes(_behind_call(explanation, assignment, calls, now), assignment, causes, ahead)
        for assignment, explanation in zip(assignments, found, strict=True)
    ]


def _behind_call(
    explanation: Explanation, assignment: Assignment, calls: Mapping[Place, EarlierCall], now: float
) -> Explanation:
    if explanation.blocking_offset is None:
        return explanation
    call = calls.get((assignment, explanation.blocking_offset))
    return explanation if call is None else replace(explanation, **_of_call(call, now))


def _of_call(call: EarlierCall | AbandonedCall, now: float) -> dict[str, Any]:
    """Return the state of a message that waits for a call."""
    age = max(0.0, now - call.since)
    whose = "an earlier call of the same key"
    if isinstance(call, EarlierCall) and not call.is_same_key:
        whose = "a call of its lane"
    detail = f"behind {whose}, in {call.handler} on {call.worker} for {age:.1f} s"
    return {"state": BEHIND_CALL, "detail": detail, "age": age, "worker": call.worker}


def _with_causes(
    explanation: Explanation, assignment: Assignment, causes: Causes, ahead: Mapping[Place, ConsumerParked]
) -> Explanation:
    """Add what holds a partition beside its own message."""
    if (pause := causes.app_pause(assignment)) is not None:
        when = datetime.fromtimestamp(pause.since, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
        explanation = replace(
            explanation, paused=f"{PauseReason.APP} since {when}; {pause.ended_by} lets it go on", lag=None
        )
    elif assignment.paused is PauseReason.APP:
        # It was resumed; the poll thread tells the client in its next step.
        explanation = replace(explanation, paused=None)
    explanation = _with_trouble(explanation, assignment, causes)
    if explanation.blocking_offset is None:
        return explanation
    place = (assignment, explanation.blocking_offset)
    if (words := causes.publishing.get(place)) is not None:
        return replace(explanation, state="dead letter", detail=words)
    if (words := causes.results(*place)) is not None:
        return replace(explanation, state="publishing", detail=words)
    if place in ahead and (head := head_of(ahead[place])) is not None:
        first = (head[0].assignment, head[2].offset())
        detail = f"it waits for {first[0]}@{first[1]} of its key"
        if ahead[place].state is KeyState.HELD:
            detail += ", which its handler holds"
        if (words := causes.publishing.get(first)) is not None:
            detail += f", of which {words}"
        return replace(explanation, state="behind its key", detail=detail)
    return explanation


def _with_trouble(explanation: Explanation, assignment: Assignment, causes: Causes) -> Explanation:
    """Add what is wrong with its topic."""
    if (open_transaction := causes.open_transaction(assignment)) is not None:
        explanation = replace(explanation, trouble=open_transaction)
    if (trouble := causes.topic_trouble(assignment.topic)) is not None:
        # What the client last knew of the end of the log means nothing then.
        explanation = replace(explanation, trouble=trouble, lag=None)
    if (missing := causes.missing_rights(assignment.topic)) is not None:
        explanation = replace(explanation, trouble=missing)
    return explanation


def shut_out(handlers: Mapping[str, Handler], why: str, causes: Causes, state: str) -> list[Explanation]:
    """Return an explanation of each topic for a consumer that has no partition."""
    return [
        Explanation(
            *(topic, -1, -1, -1, 0, 0, 0, None, why),
            handler=handler.name,
            state=state,
            trouble=causes.missing_rights(topic) or causes.topic_trouble(topic),
        )
        for topic, handler in handlers.items()
    ]


def no_topic(patterns: Mapping[str, Handler], when: str, failures: Mapping[str, str]) -> list[Explanation]:
    """Return an explanation of each pattern without a topic, and of each topic that matches and is not consumed."""
    whys = {
        pattern: (handler.name, f"no topic matches this pattern yet; {when}") for pattern, handler in patterns.items()
    }
    whys |= {topic: ("", f"it matches a pattern and cannot be consumed: {why}") for topic, why in failures.items()}
    return [
        Explanation(*(topic, -1, -1, -1, 0, 0, 0, None, why), handler=name, state="no topic")
        for topic, (name, why) in whys.items()
    ]


def _explain(
    assignment: Assignment,
    in_handler: dict[tuple[Assignment, int], ExecutionSlot],
    parked_heads: dict[tuple[Assignment, int], tuple[object, ConsumerParked]],
    now: float,
) -> Explanation:
    counts = partition_statistics(assignment)
    blocking: dict[str, object] = {} if assignment.known else {"state": UNKNOWN}
    if counts.in_flight:
        place = (assignment, counts.watermark)
        blocking = {"blocking_offset": counts.watermark, "state": "queued"}
        token_bucket = assignment.route.token_bucket
        if (rate := token_bucket.rate) == 0 or (rate is not None and token_bucket.next_release(now) is not None):
            blocking |= {"state": "held by rate", "rate": rate}
        if place in parked_heads:
            key, parked = parked_heads[place]
            state = parked.state
            blocking |= {
                "state": state_of(parked),
                "detail": _HELD if state is KeyState.HELD else None,
                "rate": rate if parked.awaits_token else None,
                "key": key_of(key.key if isinstance(key, NotDue) else key),
                "attempt": parked.attempts,
                "over_time_limit": parked.over_time_limit,
                "age": max(0.0, now - parked.since) if parked.since else None,
                "due_in": max(0.0, parked.due_at - now) if state is KeyState.WAITING else None,
            }
            if isinstance(parked.call, AbandonedCall) and parked.is_blocked and state is KeyState.WAITING:
                blocking |= {"due_in": None, **_of_call(parked.call, now)}
        if place in in_handler:
            blocking.pop("detail", None)
            slot = in_handler[place]
            record, limit, age = slot.record, assignment.route.time_limit, max(0.0, now - slot.started)
            before = parked_heads[place][1].over_time_limit if place in parked_heads else 0
            blocking |= {
                "state": "in handler",
                "rate": None,
                "key": None if record is None else record.key(),
                "over_time_limit": before + (limit is not None and age >= limit),
                "age": age,
                "due_in": None,
                "worker": slot.name,
            }
    return Explanation(
        # Not `asdict`, which copies deeply: that was most of what a report of many partitions cost.
        **{name: getattr(counts, name) for name in PartitionStatistics.__slots__},
        handler=assignment.route.handler.name,
        gaps=len(assignment.tracker.gaps()),
        **blocking,  # type: ignore[arg-type] # keys and types are those set above
    )
