"""The fetcher: takes messages from the client, as many as back-pressure allows, and puts them on lanes.

It runs on the poll thread, and most of that thread's work is here. So the loops are written for speed: one call per
partition to the tracker, one call per lane to the scheduler, and few calls into C per message.

Users' `key=` functions are called here too, because the key chooses the lane. They must be quick. The engine's
`poll_slot` shows the message of such a call and its start to any thread, as a worker's slot does. A key function that
keeps the poll thread from its commits is logged.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import compress, groupby
from operator import not_
from typing import TYPE_CHECKING

from confluent_kafka import KafkaError

from penstock.clients.cluster import ConsumerClient
from penstock.clients.gc_pause import CollectionThreshold
from penstock.clients.kafka_errors import ErrorKind, kind_of
from penstock.consumer.assignments import Assignment, ConsumerLane, ConsumerRun, Fetch, total_size_in_bytes
from penstock.consumer.engine import Engine
from penstock.consumer.lanes.slot import ExecutionSlot
from penstock.consumer.poll.back_pressure import BackPressure
from penstock.consumer.poll.membership import Membership
from penstock.consumer.poll.positions import Positions
from penstock.consumer.poll.refusals import Refusals
from penstock.message import Record, column
from penstock.routing import Run

if TYPE_CHECKING:
    from confluent_kafka import Message as ClientMessage

_log = logging.getLogger(__name__)

#: Seconds to wait before the next try if everything is full.
SATURATED_S = 0.002
#: Messages that the client returns in one call. It makes their objects with Python's lock held, 0.7 µs each: a whole
#: fetch in one call would keep all handlers from returning for 7 ms.
_PIECE = 500
#: Messages in a batch that justify a step of their own.
_LARGE_BATCH = 500
#: Small batches are gathered for this time in seconds: the maximum, and the part of the transaction interval. Each
#: batch wakes the poll thread and workers. If its results wait for a transaction anyway, fewer and larger batches cost
#: a third less.
_MAX_GATHER_S = 0.005
_GATHER_PART = 1 / 20


class Fetcher:
    """Fetches messages. On the poll thread only."""

    def __init__(
        self,
        engine: Engine,
        membership: Membership,
        back_pressure: BackPressure,
        refusals: Refusals,
        positions: Positions,
    ) -> None:
        self._engine = engine
        self._clock = engine.clock
        self._membership = membership
        self._back_pressure = back_pressure
        self._refusals = refusals
        self._positions = positions
        interval_s = engine.settings.transaction_interval if engine.settings.exactly_once else 0.0
        self._gather_s = min(_MAX_GATHER_S, interval_s * _GATHER_PART)
        self.collection_threshold = CollectionThreshold()
        self._taken_at = float("-inf")
        self._took_large_batch = False
        # The topic of all messages; empty if there are several, or if patterns may find more. To ask each message costs
        # a tenth of the routing.
        topics = () if engine.patterns else tuple(engine.routes)
        self._only_topic = topics[0] if len(topics) == 1 else ""
        # Seconds that the keys of one fetch may take before a log line: the poll thread cannot commit meanwhile.
        self._slow_keys_s = engine.settings.commit_interval
        # The arrival number of the next message. It starts at 1, because 0 is older than all.
        self._arrival = 1
        self._now = 0.0
        # The numbers from 0, shared by the runs of all fetches: else each message in flight would have its own object.
        self._indexes: list[int] = []
        # Messages per topic and partition since the last report to telemetry.
        self._counts: dict[str, dict[int, int]] = {}

    def fetch(self, poll_timeout: Callable[[float], float]) -> None:
        """Fetch what is available; if there is nothing, wait for a first message.

        `poll_timeout` returns the seconds to wait, given the time on the engine's clock.
        """
        client = self._membership.client
        started_at = self._clock.monotonic()
        if not self._took_large_batch and (left_s := self._taken_at + self._gather_s - started_at) > 0:
            self._clock.sleep(left_s)
            started_at += left_s
        if not self._back_pressure.apply(client, self._engine.assignments.all(), started_at):
            self._clock.sleep(SATURATED_S)
            return
        limit = self._back_pressure.fetch_limit
        if not self._take([], client, limit, started_at):
            first = client.poll(poll_timeout(started_at))
            if first is not None:
                self._take([first], client, limit, started_at)

    def _take(self, batch: list[ClientMessage], client: ConsumerClient, limit: int, started_at: float) -> bool:
        """Route `batch` with everything else that is available; return whether there was anything."""
        while len(batch) < limit:
            piece = client.consume(min(_PIECE, limit - len(batch)), 0)
            batch += piece
            if len(piece) < _PIECE:
                break
        if batch:
            self._taken_at, self._took_large_batch = self._clock.monotonic(), len(batch) >= _LARGE_BATCH
            in_flight = self._back_pressure.in_flight + len(batch)
            self.collection_threshold.note_in_flight(in_flight, self._taken_at)
            self.route(batch)
        if batch and self._engine.telemetry is not None:
            seconds = self._clock.monotonic() - started_at
            counts, self._counts = self._counts, {}
            for topic, of_topic in counts.items():
                self._engine.telemetry.polled(topic, of_topic, seconds)
        return bool(batch)

    def route(self, batch: list[ClientMessage]) -> None:
        """Put messages on their lanes and handle the errors among them. An error that ends the consumer is raised."""
        errors: list[tuple[KafkaError, str | None, int | None]] = []
        # In C: an interpreter step per message would be a fiftieth of its cost. An error is true. Compared with None
        # it raises, because `KafkaError` takes its operand for a number.
        if any(map(type(batch[0]).error, batch)):
            errors = [
                (error, message.topic(), message.partition())
                for message in batch
                if (error := message.error()) is not None
            ]
            batch = [message for message in batch if message.error() is None]
        if batch:
            self.put_on_lanes(batch, self._clock.monotonic())  # type: ignore[arg-type] # fetched messages have a place
        for error, topic, partition in errors:
            if kind_of(error) is ErrorKind.OUT_OF_RANGE:
                self._positions.note_lost(error, topic or "", partition or 0)
            elif self._refusals.take(error, topic):
                self._membership.client_ended()

    def put_on_lanes(self, batch: Sequence[Record], now: float) -> None:
        """Track messages without errors, put them on their lanes and wake workers."""
        self._now, engine = now, self._engine
        touched: dict[int, ConsumerLane] = {}
        at = 0
        # A batch has long stretches of one partition. `groupby` finds their ends in C.
        for place, same in groupby(self._places(batch)):
            records = batch[at : at + len(list(same))]
            at += len(records)
            topic, partition = place if isinstance(place, tuple) else (self._only_topic, place)
            of_topic = self._counts.setdefault(topic, {})
            of_topic[partition] = of_topic.get(partition, 0) + len(records)
            assignment = engine.assignments.get(topic, partition)
            if assignment is None:
                engine.counts.stale += len(records)
                continue
            engine.counts.received += len(records)
            for rising, offsets in _rising(records):
                self._put(engine.assignments.get(topic, partition) or assignment, rising, offsets, touched)
                self._arrival += len(rising)
        # Appended before `Scheduler.ready`: see the argument in penstock.routing.scheduler.
        engine.wake(engine.scheduler.ready(touched.values()))

    def _places(self, batch: Sequence[Record]) -> list[int] | list[tuple[str, int]]:
        """Return the origin of each message; only its partition if there is one topic."""
        if self._only_topic:
            return column(batch, "partition")
        return [(record.topic(), record.partition()) for record in batch]

    def _put(
        self,
        assignment: Assignment,
        records: Sequence[Record],
        offsets: Sequence[int],
        touched: dict[int, ConsumerLane],
    ) -> None:
        if offsets[0] < assignment.tracker.position:
            _log.warning(
                "%s went back from offset %d to %d (log truncated, recreated or reset); handling goes on from there",
                assignment,
                assignment.tracker.position,
                offsets[0],
            )
            assignment = self._engine.begin_again(assignment, offsets[0])
        block = assignment.tracker.register(offsets, total_size_in_bytes(records, assignment))
        self._engine.counts.restored += len(offsets) - block.left
        fetch = Fetch(assignment, block, self._now)
        ordering, lanes = assignment.route.ordering, assignment.route.lanes
        if ordering.calls_function:
            self._ask_keys(fetch, records)
        else:
            fetch.ask_keys(records)
        numbers = ordering.lane_numbers(assignment.topic, assignment.partition, records, fetch.keys)
        runs: dict[int, ConsumerRun] = {}
        if len(self._indexes) < len(numbers):
            self._indexes = list(range(len(numbers)))
        messages: Iterable[tuple[int, int, Record]] = zip(self._indexes, numbers, records, strict=False)
        if block.left < len(offsets):
            # Messages that a former owner had done are left out.
            messages = compress(messages, map(not_, block.done))
        for index, number, record in messages:
            run = runs.get(number)
            if run is None:
                runs[number] = Run(fetch, self._arrival, [record], [index])
            else:
                run.records.append(record)
                run.indexes.append(index)
        for number, run in runs.items():
            lane = lanes[number]
            lane.runs.append(run)
            touched[lane.number] = lane

    def _ask_keys(self, fetch: Fetch, records: Sequence[Record]) -> None:
        """Call the user's key function for a fetch, and log if it is slow."""
        slot, now = self._engine.poll_slot, self._clock.monotonic
        slot.thread_id = threading.get_ident()
        slot.fetch, slot.started = fetch, now()
        fetch.ask_keys(_shown(records, slot))  # it may never return
        took_s = now() - slot.started
        slot.leave()
        if took_s > self._slow_keys_s:
            # The next log line comes only if it is much slower.
            self._slow_keys_s = 2 * took_s
            _log.warning(
                "the key function of %s took %.1f s for %d messages of %s, and the poll thread, which calls it, cannot "
                "commit meanwhile; do not look anything up in it, or have the producer send the key in a header, for "
                "key='header:name'",
                fetch.assignment.route.handler.name,
                took_s,
                len(records),
                fetch.assignment,
            )


def _shown(records: Sequence[Record], slot: ExecutionSlot) -> Iterator[Record]:
    """Yield records, and show in the slot the record whose key is being asked for."""
    for record in records:
        slot.record = record
        yield record


def _rising(records: Sequence[Record]) -> Iterator[tuple[Sequence[Record], Sequence[int]]]:
    """Yield stretches with rising offsets, and the offsets. More than one only if the log went back between fetches."""
    offsets: list[int] = column(records, "offset")
    if offsets == sorted(offsets):  # in C; the rest is for one batch in the life of a log
        yield records, offsets
        return
    begin = 0
    for place in range(1, len(offsets)):
        if offsets[place] <= offsets[place - 1]:
            yield records[begin:place], offsets[begin:place]
            begin = place
    yield records[begin:], offsets[begin:]
