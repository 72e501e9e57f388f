"""Explanations: why a partition does not move. Which message holds its watermark, where it is, and since when."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from penstock.consumer.assignments import Assignment, PauseReason
from penstock.consumer.engine import Engine
from penstock.consumer.handlers.call_guard import AbandonedCall
from penstock.consumer.inspect.details import ParkedHead, parked_heads, parked_message
from penstock.consumer.inspect.statistics import PartitionStatistics, partition_statistics, under_way
from penstock.consumer.lanes.slot import ExecutionSlot
from penstock.consumer.poll.back_pressure import AppPauses
from penstock.consumer.poll.positions import Positions
from penstock.consumer.poll.refusals import Refusals
from penstock.consumer.poll.topics import Topics
from penstock.options import ClientConfig
from penstock.places import counted
from penstock.routing import KeyState

#: An assignment and one of its offsets.
Place = tuple[Assignment, int]


def no_partition(config: ClientConfig) -> str:
    """Return why a member with this configuration has no partition, if its group did not refuse it."""
    session = "the brokers' group.consumer.session.timeout.ms, 45000 by default"
    if "session.timeout.ms" in config:
        session = f"session.timeout.ms={config['session.timeout.ms']}"
    return (
        "no partition is assigned to this member: other members have them all, or the group rebalances, and waits for "
        f"a member that died until its session ends ({session}), or for one that lives until it has given partitions "
        f"back (max.poll.interval.ms={config.get('max.poll.interval.ms', 300_000)})"
    )


#: The state of a partition if the group's position is not known.
UNKNOWN = "position not known yet"
#: The state of a message that waits for the handler call of another message.
BEHIND_CALL = "behind a call"
_SAME_KEY = "an earlier call of the same key"
#: The detail of a key that its handler holds.
_HELD = "its tries are exhausted, and its handler holds it; remove the cause and start the app again"


@dataclass(frozen=True, slots=True)
class Explanation(PartitionStatistics):
    """One assigned partition at one moment.

    The counts are those of its statistics. If this member has no partition, or none of a topic that is absent or may
    not be read, `partition` is -1 and `paused` is the reason.

    Attributes:
        handler: name of its handler.
        gaps: ranges of offsets done above the watermark.
        blocking_offset: the offset that holds the watermark, or None if nothing is in flight.
        state: the state of that message: "idle", "in handler", "parked", "queued", "behind its key", "held by rate",
            "put off" (its deferred completion is open), "held" (its tries are exhausted, and `on_failure="hold"`),
            "publishing" (its results or its dead letter are being written), "dead letter" (a topic refused it), "behind
            a call" (an earlier call of its key or lane has not returned). Or of the partition: "position not known yet"
            (the group has no offset, or it was not received, and no message came), "shut out" (the group refuses this
            member), "no partition" (the group gives it none), "no topic" (no topic matches the pattern that stands for
            the topic, or the topic cannot be consumed).
        key: the common key of that message and those that wait for it; bytes for a key. Not part of `repr` or `str`.
        attempt: how often it was tried before.
        age: seconds in the handler, or of the call that it waits for, or since the first try of a parked message; for a
            message of a retry topic without a try, since its retry time; while its results or its dead letter are being
            written, since `explain` first found that; else None.
        due_in: seconds until the next try of a parked message; None if no time is set.
        rate: messages/s of its handler, if the message waits for the rate.
        worker: name of the thread or task that handles it, or of the call that it waits for.
        detail: what else it waits for: for a dead letter, the topic and the broker's error; for a message behind a
            parked one of its key, the topic, partition and offset of that one.
        trouble: what is wrong with the topic, or None: it does not exist, no broker answers, the open transaction of
            another producer is in the way, or a right is missing, with the command that grants it.
        over_time_limit: how often its handler was over the time limit with it, a running call included.
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
            suffix = "" if self.trouble in (None, self.paused) else f"; {self.trouble}"
            return f"{self.topic}: no partition; {self.paused}{suffix}"
        place = f"{self.topic}:{self.partition}"
        suffix = "" if self.paused is None else f", paused ({self.paused})"
        suffix += "" if self.trouble is None else f", {self.trouble}"
        if self.state == UNKNOWN:
            return f"{place}: {UNKNOWN} (no offset and no message so far){suffix}"
        lag = "unknown" if self.lag is None else str(self.lag)
        text = f"{place}: lag {lag}, watermark {self.watermark}, {self.in_flight} in flight"
        text += f" ({self.bytes_in_flight} bytes), {self.gaps} gaps{suffix}"
        return text if self.blocking_offset is None else f"{text}; held by {self.holder()}"

    def holder(self) -> str:
        """Return the message that holds the watermark, in words."""
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
            text += f" after {counted(self.attempt, 'failed try', 'failed tries')}"
        if self.over_time_limit:
            text += f", over its time limit, {counted(self.over_time_limit, 'time')}"
        if self.due_in is not None:
            text += f", next try in {self.due_in:.1f} s"
        if self.detail is not None:
            text += f": {self.detail}"
        return text


class Explainer:
    """Explains the state of a running engine. Any thread. An answer is about one moment, from live state."""

    def __init__(
        self, engine: Engine, topics: Topics, refusals: Refusals, positions: Positions, app_pauses: AppPauses
    ) -> None:
        self._engine = engine
        self._topics = topics
        self._refusals = refusals
        self._positions = positions
        self._app_pauses = app_pauses
        #: Why this member may have no partition, in words. Empty before it is connected: nothing is explained then.
        self.no_partition = ""
        # The blocking messages whose output is being written, and since when. Replaced as a whole.
        self._publishing: Mapping[Place, float] = {}

    def explain(self, *, is_leaving: bool) -> list[Explanation]:
        """Explain each assigned partition, or each topic if this member has no partition."""
        if not self.no_partition:
            return []
        topics, assigned = self._topics, self._engine.assignments.all()
        why = f"no topic matches this pattern yet; {topics.when()}"
        found = [
            _without_partition(pattern, handler.name, "no topic", why, lag=0)
            for pattern, handler in topics.without_topic().items()
        ]
        found += [
            _without_partition(topic, "", "no topic", f"it matches a pattern and cannot be consumed: {why}")
            for topic, why in topics.failures.items()
        ]
        if assigned or is_leaving:
            here = {assignment.topic for assignment in assigned}
            # The group takes the partitions of such a topic away, so nothing else would name it.
            found += [
                _without_partition(topic, "", "no topic", why, why)
                for topic, why in topics.unassignable.items()
                if topic not in here
            ]
            return found + self.of(assigned)
        refusal = self._refusals.of_group()
        state, why = ("shut out", refusal) if refusal else ("no partition", self.no_partition)
        return found + [
            _without_partition(topic, handler.name, state, why, refusal or topics.trouble(topic))
            for topic, handler in self._engine.handlers.items()
        ]

    def of(self, assignments: Sequence[Assignment]) -> list[Explanation]:
        """Return an explanation of each assignment."""
        self._engine.complete_finished()
        slots, now = self._engine.slots(), self._engine.clock.monotonic()
        publishing: dict[Place, float] = {}
        calls = {(fetch.assignment, record.offset()): slot for slot, fetch, record in under_way(slots)}
        heads = {(head[2][0].assignment, head[2][2].offset()): head for head in parked_heads(self._engine.scheduler)}
        found: dict[Place, dict[str, Any]] = {}
        for assignment in assignments:
            counts = partition_statistics(assignment)
            place = (assignment, counts.watermark)
            # `asdict` copies deeply: that was most of the cost of a report with many partitions.
            values = found[place] = {name: getattr(counts, name) for name in PartitionStatistics.__slots__}
            values |= {"handler": assignment.route.handler.name, "gaps": len(assignment.tracker.gaps())}
            if counts.in_flight:
                values |= {
                    "blocking_offset": counts.watermark,
                    **_blocking(place, calls.get(place), heads.get(place), now),
                }
                values |= self._on_its_way_out(place)
                if values["state"] == "publishing":
                    since = publishing[place] = self._publishing.get(place, now)
                    values["age"] = now - since
            elif not assignment.known:
                values["state"] = UNKNOWN
        self._publishing = publishing
        queued = {place for place, values in found.items() if values.get("state") == "queued"}
        for place, behind in [*_behind_calls(slots, queued, now), *self._behind_keys(queued)]:
            found[place] |= behind
        return [
            Explanation(**{**values, **self._partition_state(assignment)}) for (assignment, _), values in found.items()
        ]

    def _on_its_way_out(self, place: Place) -> dict[str, Any]:
        if (words := self._engine.dead_letter_publisher.states.get(place)) is not None:
            return {"state": "dead letter", "detail": words}
        words = self._engine.outbox.state_of(*place)
        return {} if words is None else {"state": "publishing", "detail": words}

    def _behind_keys(self, wanted: Collection[Place]) -> Iterator[tuple[Place, dict[str, Any]]]:
        """Yield those of the `wanted` messages that wait behind the head of a parked key.

        It searches all waiting messages.
        """
        publishing = self._engine.dead_letter_publisher.states
        for _, parked, (fetch, _, record) in parked_heads(self._engine.scheduler) if wanted else ():
            whose = "batch" if len(parked.keys) > 1 else "key"
            detail = f"it waits for {fetch.assignment}@{record.offset()} of its {whose}"
            if parked.state is KeyState.HELD:
                detail += ", which its handler holds"
            if (words := publishing.get((fetch.assignment, record.offset()))) is not None:
                detail += f": {words}"
            # A copy, made in one step: the lane's holder changes it meanwhile.
            for behind, _, waiting in parked.waiting.copy():
                place = (behind.assignment, waiting.offset())
                if place in wanted:
                    yield place, {"state": "behind its key", "detail": detail}

    def _partition_state(self, assignment: Assignment) -> dict[str, Any]:
        """Return the state of a partition apart from its messages: the app's pause, and trouble with its topic."""
        values: dict[str, Any] = {}
        if (pause := self._app_pauses.of(assignment)) is not None:
            when = datetime.fromtimestamp(pause.since, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
            values = {"paused": f"{PauseReason.APP} since {when}; {pause.ended_by} lets it go on", "lag": None}
        elif assignment.paused is PauseReason.APP:
            # The app has resumed it; the poll thread tells the client in its next step.
            values = {"paused": None}
        trouble = self._topics.trouble(assignment.topic)
        if trouble is not None:
            # The client's last known end of the log is void then.
            values["lag"] = None
        return {**values, "trouble": self._refusals.of_group() or trouble or self._positions.trouble(assignment)}


def _blocking(place: Place, slot: ExecutionSlot | None, head: ParkedHead | None, now: float) -> dict[str, Any]:
    """Return the state of a message that holds a partition: in its handler, parked, held by rate, or queued."""
    route = place[0].route
    if slot is not None:
        record, age = slot.record, max(0.0, now - slot.started)
        over = route.time_limit is not None and age >= route.time_limit
        return {
            "state": "in handler",
            "key": None if record is None else record.key(),
            "attempt": 0 if head is None else head[1].attempts,
            "over_time_limit": over + (0 if head is None else head[1].over_time_limit),
            "age": age,
            "worker": slot.name,
        }
    if head is not None:
        return _parked(head, now)
    token_bucket = route.token_bucket
    if (rate := token_bucket.rate) == 0 or (rate is not None and token_bucket.next_release(now) is not None):
        return {"state": "held by rate", "rate": rate}
    return {"state": "queued"}


def _parked(head: ParkedHead, now: float) -> dict[str, Any]:
    shown, (_, parked, (fetch, _, _)) = parked_message(head, now), head
    values: dict[str, Any] = {name: getattr(shown, name) for name in ("state", "key", "attempt", "age", "due_in")}
    values["over_time_limit"] = parked.over_time_limit
    if parked.awaits_token:
        values["rate"] = fetch.assignment.route.token_bucket.rate
    if parked.state is KeyState.HELD:
        values["detail"] = _HELD
    call = parked.call
    if isinstance(call, AbandonedCall) and parked.is_blocked and parked.state is KeyState.WAITING:
        values |= {"due_in": None, **_behind(_SAME_KEY, call.handler, call.worker, now - call.since)}
    return values


def _behind(whose: str, handler: str, worker: str, age: float) -> dict[str, Any]:
    age = max(0.0, age)
    detail = f"behind {whose}, in {handler} on {worker} for {age:.1f} s"
    return {"state": BEHIND_CALL, "detail": detail, "age": age, "worker": worker}


def _behind_calls(
    slots: Iterable[ExecutionSlot], wanted: Collection[Place], now: float
) -> Iterator[tuple[Place, dict[str, Any]]]:
    """Yield those of the `wanted` messages that wait in their lanes for a call. Each is the watermark of its partition.

    The call may belong to a former incarnation of a partition: after a rebalance its handler goes on, and nothing else
    shows it.
    """
    for slot, fetch, record in under_way(slots) if wanted else ():
        route, since, lane = fetch.assignment.route, slot.started, slot.lane
        # A copy, made in one step: the fetcher appends and the lane's holder takes meanwhile.
        for run in lane.runs.copy() if lane is not None else ():
            if run.next >= len(run.records):
                continue
            first = run.records[run.next]
            place = (run.owner.assignment, first.offset())
            if place in wanted:
                ordering = run.owner.assignment.route.ordering
                is_same = route.handler.key is None and ordering.identity(first) == route.ordering.identity(record)
                whose = _SAME_KEY if is_same else "a call of its lane"
                yield place, _behind(whose, route.handler.name, slot.name, now - since)


def _without_partition(
    topic: str, handler: str, state: str, why: str, trouble: str | None = None, *, lag: int | None = None
) -> Explanation:
    return Explanation(*(topic, -1, -1, -1, 0, 0, 0, lag, why), handler=handler, state=state, trouble=trouble)
