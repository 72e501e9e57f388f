"""The coordinator's loop: read what is there, check what is due, publish what is decided.

One thread does all of it, round by round, save the Kafka transactions themselves, which the engine has threads for. The
loop never waits for them: while one is under way the next decisions are read.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable

from confluent_kafka import Message

from penstock.clients.gc_pause import collection_put_off
from penstock.clients.kafka_errors import ErrorKind, kind_of, reason
from penstock.transactions.publishing.engine import IN_FLIGHT_S, Engine
from penstock.transactions.publishing.publisher_slot import SLOW_S
from penstock.transactions.stores.kafka.context import CoordinatorContext
from penstock.transactions.stores.kafka.coordinator.checks import CheckScheduler
from penstock.transactions.stores.kafka.coordinator.log_upkeep import LogUpkeep
from penstock.transactions.stores.kafka.coordinator.membership import Membership
from penstock.transactions.stores.kafka.coordinator.status import Status, StatusLog

_log = logging.getLogger("penstock.transactions")

#: Seconds the loop waits for records before it serves its membership again.
_POLL_S = 0.05
#: Seconds between two status records.
_STATUS_INTERVAL_S = 1.0
#: Rights without which things are published all the same: to delete from logs, to see who can be asked.
_HARMLESS = ("Delete", "Describe")


class CoordinatorLoop:
    """What the coordinator's thread does. Used by that thread alone. `name` is that of the coordinator."""

    def __init__(
        self,
        context: CoordinatorContext,
        name: str,
        *,
        membership: Membership,
        engine: Engine,
        upkeep: LogUpkeep,
        checks: CheckScheduler,
        status: StatusLog,
    ) -> None:
        self._name = name
        self._context, self._topics, self._counts = context, context.topics, context.counts
        self._ration, self._rights = context.ration, context.rights
        self._membership = membership
        self._owned = membership.owned
        self._engine = engine
        self._upkeep = upkeep
        self._checks = checks
        self._status = status
        self._status_at = 0.0

    def round(self) -> None:
        """Do once what the coordinator does for ever."""
        engine, now = self._engine, time.monotonic()
        engine.poll(now)
        # Nothing can be published before it ends, so what comes meanwhile is read in larger pieces.
        has_ended = engine.take_result(IN_FLIGHT_S)
        self._count(now)
        self._membership.serve()
        if self._membership.was_cut_off():
            engine.shut()
        # What waits to be published goes first: whoever reads all that is there reads for ever, and publishes little.
        if not engine.is_crowded(sum(p.state.queue.ready for p in self._owned.values())):
            self._read(0.0 if has_ended else self._read_timeout_s(time.monotonic()))
        now = time.monotonic()
        self._upkeep.look(self._owned, now)
        engine.targets.look_now_and_then(now)
        for partition in self._owned.values():
            self._checks.run(partition, now)
        engine.release(now)
        # Not while a common transaction is under way or in doubt: upkeep takes the end of the done log for known, and
        # what that transaction wrote there would never be looked for.
        if engine.is_idle:
            self._upkeep.maintain(self._owned, now)
            self._give_up()
        engine.begin(now)
        self._update_status(now)

    def _give_up(self) -> None:
        """Have partitions taken over again whose logs are not as they were read.

        What is tried apart must have ended: the next owner, which is this one, would not shut it out.
        """
        for number in [number for number, partition in self._owned.items() if partition.is_given_up]:
            if not self._engine.has_part(number):
                self._membership.give_up(number)

    def _count(self, now: float) -> None:
        counts, recovering = self._counts, self._membership.recoveries.slow_call(now)
        counts.groups, counts.recoveries = self._engine.groups, self._engine.recoveries
        none = "", 0.0
        slow = self._engine.slow_call(), recovering if recovering[1] >= SLOW_S else none
        counts.slow_call, counts.slow_call_s = max(slow, key=lambda call: call[1])

    def _update_status(self, now: float) -> None:
        """Write down what hinders publication, where operators look."""
        if now - self._status_at < _STATUS_INTERVAL_S:
            return
        self._status_at = now
        quarantine, call, missing = self._engine.quarantine, self._counts.slow_call, self._rights.missing()
        lacking = {name: text for name, text in missing.items() if not name.startswith(_HARMLESS)}
        halts = [f"a right that the coordinator lacks: {text}" for text in dict.fromkeys(lacking.values())]
        self._status.write(
            Status(
                self._name,
                int(time.time() * 1000),
                (*self._owned, *self._membership.recoveries.partitions),
                quarantine.refusing() | quarantine.reasons(),
                self._checks.unasked(self._owned),
                (*halts, *([f"Kafka: {call} has not returned for more than {SLOW_S:g} s"] if call else ())),
                tuple(dict.fromkeys(text for name, text in missing.items() if name not in lacking)),
            ),
            now,
        )

    def _read_timeout_s(self, now: float) -> float:
        """Return how long to wait for records."""
        engine = self._engine
        if engine.is_in_flight:
            return 0.0
        if engine.has_doubt or engine.is_busy:
            return IN_FLIGHT_S
        if not any(p.state.has_work for p in self._owned.values()):
            return _POLL_S
        # What cannot begin now waits for a time or an answer. Where it could, and did not, payloads are on their way.
        return IN_FLIGHT_S if engine.is_ready(now) else _POLL_S

    def _read(self, timeout_s: float) -> None:
        # In pieces of what one Kafka transaction settles: what is read beyond that waits here instead of in the logs.
        limit = self._engine.decisions
        undecided = sum(len(p.state.pending) - len(p.state.decided) for p in self._owned.values())
        for_halves = any(p.feed.waiting for p in self._owned.values())
        records = self._membership.logs.read(timeout_s, limit, for_halves=for_halves, full=undecided >= 2 * limit)
        with collection_put_off():
            self._feed(records, time.monotonic())

    def _feed(self, records: Iterable[Message], now: float) -> None:
        half_topic = self._topics.half
        for message in records:
            error = message.error()
            if error is not None:
                topic = message.topic() or half_topic
                if not self._context.may_not_read(error, f"the log {topic} cannot be read", topic):
                    self._ration.warn("read", "the half and op logs cannot be read: %s; trying again", reason(error))
                partition = self._owned.get(message.partition() or 0)
                if kind_of(error) is ErrorKind.OUT_OF_RANGE and partition is not None:
                    # The reader stands still: the log does not have the next offset.
                    partition.give_up(f"{message.topic()} does not have the offset that is read next")
                continue
            partition = self._owned.get(message.partition() or 0)
            if partition is None:
                continue
            if message.topic() == half_topic:
                partition.feed.half(message, now)
            else:
                partition.feed.op(message, now)
        for number, partition in self._owned.items():
            partition.note_progress(now)
            self._membership.logs.bound(number, partition.feed.waiting)
