"""Why a partition does not move: what holds its watermark, where that message is, and since when."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from penstock.consumer.assignments import Assignment, ConsumerParked, Fetch
from penstock.consumer.execution_slot import ExecutionSlot, complete_finished
from penstock.consumer.failures.parking import NotDue
from penstock.consumer.handlers.handler import Handler
from penstock.consumer.handlers.ordering import key_of
from penstock.consumer.inspection.causes import Context, Place, nothing_known, parked_ahead
from penstock.message import Record
from penstock.routing import KeyState, Scheduler

#: The state of a partition of which it is not known where the group stands.
UNKNOWN = "position not known yet"
#: The state of a message by that of its parked key.
_STATES = {
    KeyState.WAITING: "parked",
    KeyState.DEFERRED: "put off",
    KeyState.SENDING: "put off",
    KeyState.HELD: "held",
    KeyState.STOPPING: "parked",
}
#: What is said of a key that its handler holds.
_HELD = "its tries are exhausted, and its handler holds it; mend the cause and start the app again"


@dataclass(frozen=True, slots=True)
class Explanation:
    """One assigned partition at one moment.

    Attributes:
        topic: name of the topic.
        partition: number of the partition; -1 where the group does not take this member.
        handler: name of its handler.
        lag: offsets from the watermark to the end of the log, or None while one of them is not known.
        watermark: lowest offset not done; 0 while no position is known.
        position: next offset to fetch; 0 while it is not known.
        in_flight: messages taken in and not done.
        parked: how many of them are set aside, as `max_parked` counts them.
        bytes_in_flight: bytes of those in flight.
        gaps: ranges of offsets done above the watermark.
        paused: why the partition is paused, or why the group does not take this member; or None.
        blocking_offset: the offset that holds the watermark, or None where nothing is in flight.
        state: where that message is: "idle", "in handler", "parked", "put off" (a deferred completion is out),
            "held" (its tries are exhausted, by `on_failure="hold"`),
            "dead letter" (on its way to another topic), "queued", "behind its key", "held by rate", or "shut out" where
            the group does not take this member and "no partition" where it gives it none;
            "position not known yet" where the group has no offset, or did not tell it, and no message came.
        key: what the messages that wait for it have in common with it; bytes for a key. Not part of `repr` or `str`.
        attempt: how often it was tried before.
        age: seconds in the handler, or since its first try when it is parked; None elsewhere.
        due_in: seconds until its next try, when it is parked; None where there is none by the clock.
        rate: messages/s that its handler may begin, when that is what it waits for.
        worker: name of the thread or task that has it.
        detail: what it waits for beside that: for a dead letter, the topic and the broker's words; for a message behind
            a parked one of its key, the place of that, in whatever topic.
        trouble: what is wrong with the topic: it does not exist, no broker tells of it, or which right is missing and
            what gives it; or None.
    """

    topic: str
    partition: int
    handler: str
    lag: int | None
    watermark: int
    position: int
    in_flight: int
    parked: int
    bytes_in_flight: int
    gaps: int
    paused: str | None
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

    def __str__(self) -> str:
        """Say it in a sentence."""
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
        if self.worker is not None:
            text += f" {self.handler} on {self.worker}"
        else:
            text += f" ({self.handler})" if self.rate is None else f" {self.rate:g}/s ({self.handler})"
        if self.age is not None:
            text += f" for {self.age:.1f} s"
        if self.attempt:
            text += f" after {self.attempt} failed tries"
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
    context: Context | None = None,
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
            head = _head(parked)
            if head is not None:
                parked_heads[head[0].assignment, head[2].offset()] = (key, parked)
    context = context or nothing_known()
    found = [_explain(one, in_handler, parked_heads, now) for one in assignments]
    queued = {
        (one, said.blocking_offset)
        for one, said in zip(assignments, found, strict=True)
        if said.state == "queued" and said.blocking_offset is not None
    }
    ahead = parked_ahead(scheduler, queued)
    return [_within(said, one, context, ahead) for one, said in zip(assignments, found, strict=True)]


def _within(
    said: Explanation, assignment: Assignment, context: Context, ahead: Mapping[Place, ConsumerParked]
) -> Explanation:
    """Add what holds a partition beside its own message."""
    if (trouble := context.trouble(assignment.topic)) is not None:
        # What the client last heard of the log's end says nothing then.
        said = replace(said, trouble=trouble, lag=None)
    if (missing := context.missing(assignment.topic)) is not None:
        said = replace(said, trouble=missing)
    if said.blocking_offset is None:
        return said
    place = (assignment, said.blocking_offset)
    if (words := context.outgoing.get(place)) is not None:
        return replace(said, state="dead letter", detail=words)
    if place in ahead and (head := _head(ahead[place])) is not None:
        first = (head[0].assignment, head[2].offset())
        detail = f"it waits for {first[0]}@{first[1]} of its key"
        if ahead[place].state is KeyState.HELD:
            detail += ", which its handler holds"
        if (words := context.outgoing.get(first)) is not None:
            detail += f", of which {words}"
        return replace(said, state="behind its key", detail=detail)
    return said


def shut_out(
    handlers: Mapping[str, Handler], why: str, context: Context | None = None, state: str = "shut out"
) -> list[Explanation]:
    """Return an explanation of each topic for a consumer that has no partition."""
    context = context or nothing_known()
    return [
        Explanation(
            topic,
            -1,
            one.name,
            None,
            -1,
            -1,
            0,
            0,
            0,
            0,
            paused=why,
            state=state,
            trouble=context.missing(topic) or context.trouble(topic),
        )
        for topic, one in handlers.items()
    ]


def _head(parked: ConsumerParked) -> tuple[Fetch, int, Record] | None:
    try:
        return parked.waiting[0]
    except IndexError:  # its holder has just taken the last
        return None


def _explain(
    assignment: Assignment,
    in_handler: dict[tuple[Assignment, int], ExecutionSlot],
    parked_heads: dict[tuple[Assignment, int], tuple[object, ConsumerParked]],
    now: float,
) -> Explanation:
    tracker = assignment.tracker
    watermark, in_flight = tracker.watermark, tracker.in_flight
    blocking: dict[str, object] = {} if assignment.known else {"state": UNKNOWN}
    if in_flight:
        place = (assignment, watermark)
        blocking = {"blocking_offset": watermark, "state": "queued"}
        token_bucket = assignment.route.token_bucket
        if (rate := token_bucket.rate) == 0 or (rate is not None and token_bucket.next_release(now) is not None):
            blocking |= {"state": "held by rate", "rate": rate}
        if place in parked_heads:
            key, parked = parked_heads[place]
            due_at = parked.due_at if parked.state is KeyState.WAITING else math.inf
            blocking |= {
                "state": "held by rate" if parked.asked else _STATES[parked.state],
                "detail": _HELD if parked.state is KeyState.HELD else None,
                "rate": rate if parked.asked else None,
                "key": key_of(key.key if isinstance(key, NotDue) else key),
                "attempt": parked.attempts,
                "age": max(0.0, now - parked.since) if parked.since else None,
                "due_in": None if math.isinf(due_at) else max(0.0, due_at - now),
            }
        if place in in_handler:
            blocking.pop("detail", None)
            slot = in_handler[place]
            record = slot.record
            blocking |= {
                "state": "in handler",
                "rate": None,
                "key": None if record is None else record.key(),
                "age": max(0.0, now - slot.started),
                "due_in": None,
                "worker": slot.name,
            }
    return Explanation(
        topic=assignment.topic,
        partition=assignment.partition,
        handler=assignment.route.handler.name,
        lag=None if assignment.end is None or not assignment.known else max(0, assignment.end - watermark),
        watermark=watermark,
        position=tracker.position,
        in_flight=in_flight,
        parked=tracker.parked[0],
        bytes_in_flight=tracker.bytes_in_flight,
        gaps=len(tracker.gaps()),
        paused=assignment.paused,
        **blocking,  # type: ignore[arg-type] # keys and types are those set above
    )


__all__ = ["Explanation", "explain", "shut_out"]
