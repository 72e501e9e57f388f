"""Taking half partitions over: where to read on, and what was settled above that point.

Whether the logs are still those that were read is asked first of all: one that was deleted and made again, or cut, is
read from where it begins now, and what that means is said and counted.

The order matters. First the committed positions, read as a read_committed client: the broker answers only once a
predecessor's transaction that touched them has ended, and any that comes later is refused, for its group generation is
past. A transaction that does not end by itself, here or in the done log, is ended under its owner's name, which stands
beside the position. Then the done log to its end, and that is where the log ended *before* reading, not where readers
of committed records may read to now: markers of a transaction may reach `done` after they reached the positions. What
is found above the half checkpoint is all that was ever settled there.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from penstock import clients
from penstock.clients.kafka import admin_client, reason
from penstock.clients.rights import Operation, group_right, is_missing_right, topic_right
from penstock.errors import MessageFormatError, StoppedError
from penstock.options import ClientConfig
from penstock.transactions.coordinator.logs.log_bounds import topic_ids
from penstock.transactions.coordinator.logs.log_identity import (
    DONE,
    HALF,
    OP,
    Committed,
    Fate,
    Start,
    decode_ids,
    explained,
    known_ids,
    starts_of,
)
from penstock.transactions.coordinator.recovery.fencing import Fence
from penstock.transactions.coordinator.state.recovered_state import live_snapshots, without_payloads
from penstock.transactions.rationed_log import RationedLog
from penstock.transactions.wire.done_records import Done, Note, Snapshot, UnloadedSnapshot, decode_done
from penstock.transactions.wire.topics import StoreTopics
from penstock.transactions.writing.missing_rights import MissingRights, is_group_forbidden

_log = logging.getLogger("penstock.transactions")

_ANSWER_S = 10.0
_COORDINATOR_S = 2.0
_POLL_S = 0.1
_MESSAGES = 1_000
#: Seconds for which a predecessor that may be alive is left to end its transaction by itself.
_PATIENCE_S = 1.0
#: Seconds after which a transaction that holds positions has to have ended by its time limit, with room for the
#: broker's own round of looks; it is said then that it does not.
_HELD_S = 25.0
_INVALID = -1001

#: Called at each step with what is done next.
Step = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class RecoveredPartition:
    """What the owner of a half partition starts from.

    Attributes:
        half_position: where to read the half log from.
        op_position: where to read the op log from.
        half_end: the end of the half log when it was taken over.
        op_end: the end of the op log then.
        notes: what the done log says.
        done_end: the end of the done log when it was read.
        snapshots: pending transactions that the done log holds whole, each with the offset of its record.
        done_position: the offset below which the done log is known not to be needed.
        ids: topic ids of the three logs, as far as they are known.
        lost: records that are gone and were not read, at least.
        is_done_lost: whether something that the done log said is gone.
        unreadable: how many records of the done log do not read.
    """

    half_position: int
    op_position: int
    half_end: int
    op_end: int
    notes: list[Note]
    done_end: int
    snapshots: list[tuple[int, Snapshot | UnloadedSnapshot]] = field(default_factory=list)
    done_position: int = 0
    ids: Mapping[str, str] = field(default_factory=dict)
    lost: int = 0
    is_done_lost: bool = False
    unreadable: int = 0


@dataclass(frozen=True, slots=True)
class DoneRead:
    """What was read of the done log of one half partition.

    Attributes:
        end: where it ended.
        records: what it says, each with its offset.
        unreadable: offsets of records that do not read.
    """

    end: int
    records: list[tuple[int, Done]]
    unreadable: list[int] = field(default_factory=list)

    @property
    def notes(self) -> list[Note]:
        """Ends and counts, in their order."""
        return [note for _, record in self.records for note in record.notes]

    @property
    def snapshots(self) -> list[tuple[int, Snapshot | UnloadedSnapshot]]:
        """Transactions that are pending still and written down whole."""
        return live_snapshots(self.records)


class RecoveryReader:
    """Reads positions and done logs, with short-lived consumers of its own. Thread-safe: calls share nothing.

    Args:
        bootstrap_servers: Kafka's addresses.
        config: client settings by librdkafka's names.
        topics: the store's topics.
        stopping: asked between waits; once it is true, waiting ends with `StoppedError`.
        fence: ends what a predecessor left open.
        rights: where it is noted what the coordinator lacks.
    """

    def __init__(
        self,
        bootstrap_servers: str,
        config: ClientConfig,
        topics: StoreTopics,
        stopping: Callable[[], bool],
        fence: Fence,
        *,
        rights: MissingRights,
    ) -> None:
        self._topics = topics
        self._names = {HALF: topics.half, OP: topics.op, DONE: topics.done}
        self._admin = admin_client(bootstrap_servers, config)
        self._fence = fence
        self._rights = rights
        self._stopping = stopping
        self._ration = RationedLog()
        self._bootstrap_servers = bootstrap_servers
        self._settings: dict[str, Any] = {
            **config,
            "group.id": topics.coordinators,
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",
            "enable.partition.eof": True,
            # The end of a partition is told by the answer to a fetch: a broker with nothing to say shall say it soon.
            "fetch.wait.max.ms": 10,
        }
        # These consumers are nobody's member.
        self._settings.pop("group.instance.id", None)
        self._not_told = f"it cannot be read how far the transactions of {topics.prefix} are settled"

    def _consumer(self, isolation: str) -> Consumer:
        return clients.consumer(self._bootstrap_servers, {**self._settings, "isolation.level": isolation})

    def recover(self, partitions: Iterable[int], step: Step) -> dict[int, RecoveredPartition]:
        """Return what the new owner of half partitions starts from; waits for a predecessor's transaction to end.

        Args:
            partitions: which.
            step: called at each step, with what is done next.

        Raises:
            KafkaException: a broker does not answer; try again.
            StoppedError: the coordinator stops.
        """
        wanted = list(partitions)
        step("asking for topic ids")
        ids = topic_ids(self._admin, self._topics)
        committed = self._committed(wanted, step)
        done = self.done(wanted, {}, step, ends_predecessors=True)
        recovered = {}
        for p in wanted:
            found = {log: committed[name, p] for log, name in self._names.items()}
            recovered[p] = recovered_partition(found, ids, done[p], partial(tell_of_log, self._names, p))
        self._rights.granted(
            group_right(self._topics.coordinators), *(topic_right(Operation.READ, log) for log in self._names.values())
        )
        return recovered

    def await_coordinator(self) -> None:
        """Return once the coordinator of the group answers, or it is known that it does not.

        Raises:
            KafkaException: it does not answer; try again.
        """
        consumer = self._consumer("read_uncommitted")
        try:
            answer = consumer.committed([TopicPartition(self._topics.half, 0)], _COORDINATOR_S)[0]
        except KafkaException:
            self._look_for_right(consumer)
            raise
        finally:
            consumer.close()
        if answer.error is not None:
            raise KafkaException(answer.error)

    def _committed(self, partitions: list[int], step: Step) -> dict[tuple[str, int], Committed]:
        """Return how far each log was read, and where it begins and ends."""
        # What is tried apart moves no position but one of `discarded`, which tells that it is under way: it may have
        # been let through before the group changed hands, and write to the done log still.
        topics = [*self._names.values(), self._topics.discarded]
        places = [TopicPartition(topic, p) for p in partitions for topic in topics]
        consumer = self._consumer("read_committed")
        try:
            found: dict[tuple[str, int], Committed] = {}
            begun = time.monotonic()
            patient_until = begun + _PATIENCE_S
            while len(found) < len(places):
                self._check_stopping()
                step(f"asking for positions of {self._topics.coordinators}, which a Kafka transaction may hold back")
                open_places = [place for place in places if (place.topic, place.partition) not in found]
                for place in self._ask_committed(consumer, open_places):
                    if place.error is None:
                        is_log = place.topic != self._topics.discarded
                        bounds = consumer.get_watermark_offsets(place, _ANSWER_S) if is_log else (0, 0)
                        found[place.topic, place.partition] = committed_at(place, *bounds)
                if len(found) < len(places) and time.monotonic() >= patient_until:
                    patient_until = time.monotonic() + _PATIENCE_S
                    held = {place.partition for place in places if (place.topic, place.partition) not in found}
                    self._end_predecessors(held)
                    if time.monotonic() - begun >= _HELD_S:
                        self._tell_held(held)
            return found
        finally:
            consumer.close()

    def _tell_held(self, partitions: Iterable[int]) -> None:
        """Say that positions are held for longer than any transaction of ours lasts."""
        self._ration.warn(
            "held",
            "positions of %s in half partitions %s are not to be had: no broker tells them, or a Kafka transaction "
            "that should have timed out holds them back; what is decided there waits. If the brokers are well, one of "
            "them has lost a transaction's end: `kafka-transactions.sh find-hanging --broker-id N` names it, and "
            "`kafka-transactions.sh abort` ends it (KAFKA-20734 is a way into this)",
            self._topics.coordinators,
            sorted(partitions),
        )

    def _end_predecessors(self, partitions: Iterable[int]) -> None:
        """End the transactions that hold back positions or the done log."""
        consumer = self._consumer("read_uncommitted")
        try:
            # The names stand beside half positions; a transaction holds back those of its half and its op alike.
            halves = [TopicPartition(self._topics.half, number) for number in partitions]
            self._fence.end([answer.metadata for answer in consumer.committed(halves, _ANSWER_S)])
        except KafkaException as error:
            _log.info("it cannot be told who holds back positions of %s: %s", self._topics.coordinators, reason(error))
        finally:
            consumer.close()

    def _ask_committed(self, consumer: Consumer, places: list[TopicPartition]) -> list[TopicPartition]:
        try:
            answers = consumer.committed(places, _PATIENCE_S)
        except KafkaException as error:
            if is_missing_right(error):
                self._rights.refused(self._not_told, group_right(self._topics.coordinators))
                raise
            self._look_for_right(consumer)
            # UNSTABLE_OFFSET_COMMIT ends by itself, at the latest by the predecessor's transaction timeout.
            _log.info("positions of %s are not stable yet: %s", self._topics.coordinators, reason(error))
            time.sleep(_POLL_S)
            return []
        for answer in answers:
            if answer.error is not None and is_missing_right(answer.error):
                self._rights.refused(self._not_told, topic_right(Operation.READ, answer.topic))
                raise KafkaException(answer.error)
        if any(answer.error is not None for answer in answers):
            time.sleep(_POLL_S)
        return answers

    def _look_for_right(self, consumer: Consumer) -> None:
        if is_group_forbidden(consumer):
            self._rights.refused(self._not_told, group_right(self._topics.coordinators))

    def done(
        self,
        partitions: Iterable[int],
        starts: Mapping[int, int],
        step: Step = lambda _doing: None,
        *,
        ends_predecessors: bool = False,
    ) -> dict[int, DoneRead]:
        """Read done logs to their ends, waiting for open transactions to end.

        Args:
            partitions: which.
            starts: where to start, by partition; at the beginning where none is given.
            step: called at each step, with what is done next.
            ends_predecessors: whether transactions of former owners are ended that are waited for too long. Who was an
                owner before, and may not know that another one is, must not do so.

        Returns:
            What each partition says.

        Raises:
            KafkaException: a broker does not answer; try again.
            StoppedError: the coordinator stops.
        """
        step(f"asking where {self._topics.done} ends")
        bounds = self._done_bounds(partitions)
        found = {p: DoneRead(end, []) for p, (_, end) in bounds.items()}
        # A log that ends below was made again: all that it says is read.
        begins = {p: low if starts.get(p, 0) > end else max(starts.get(p, 0), low) for p, (low, end) in bounds.items()}
        behind = {p for p in found if begins[p] < found[p].end}
        if not behind:
            return found
        consumer = self._consumer("read_committed")
        try:
            consumer.assign([TopicPartition(self._topics.done, p, begins[p]) for p in behind])
            patient_until = time.monotonic() + _PATIENCE_S
            while behind:
                self._check_stopping()
                step(f"reading {self._topics.done}, in which a Kafka transaction may be open")
                messages = consumer.consume(_MESSAGES, _POLL_S)
                for message in messages:
                    self._take(message, found, behind)
                if messages:
                    patient_until = time.monotonic() + _PATIENCE_S
                elif ends_predecessors and time.monotonic() >= patient_until:
                    # One died between the records of its transaction and their positions, which hold nobody back.
                    self._end_predecessors(behind)
                    patient_until = time.monotonic() + _PATIENCE_S
        finally:
            consumer.close()
        return found

    def _done_bounds(self, partitions: Iterable[int]) -> dict[int, tuple[int, int]]:
        """Return the beginnings and ends of done logs, records of open transactions included."""
        consumer = self._consumer("read_uncommitted")
        try:
            return {
                p: consumer.get_watermark_offsets(TopicPartition(self._topics.done, p), _ANSWER_S) for p in partitions
            }
        finally:
            consumer.close()

    def _take(self, message: Message, found: Mapping[int, DoneRead], behind: set[int]) -> None:
        partition, offset = message.partition() or 0, message.offset() or 0
        error = message.error()
        if error is not None:
            # The end of what may be read now: markers give no message, so only this tells how far reading came.
            if error.code() == KafkaError._PARTITION_EOF:  # noqa: SLF001 - the library's public constants look so
                if offset >= found[partition].end:
                    behind.discard(partition)
                return
            if is_missing_right(error):
                is_group = error.code() == KafkaError.GROUP_AUTHORIZATION_FAILED
                group, log = group_right(self._topics.coordinators), topic_right(Operation.READ, self._topics.done)
                self._rights.refused(self._not_told, group if is_group else log)
            raise KafkaException(error)
        try:
            found[partition].records.append((offset, without_payloads(decode_done(message.value()))))
        except MessageFormatError as bad:
            found[partition].unreadable.append(offset)
            self._ration.warn("done", "%s[%d]@%d: %s", self._topics.done, partition, offset, bad)
        if offset + 1 >= found[partition].end:
            behind.discard(partition)

    def _check_stopping(self) -> None:
        if self._stopping():
            raise StoppedError(f"the coordinator of {self._topics.prefix} stops while taking partitions over")


def committed_at(place: TopicPartition, low: int, end: int) -> Committed:
    """Return a committed position as the client library tells it, with the bounds of its log."""
    return Committed(None if place.offset == _INVALID else place.offset, low, end, decode_ids(place.metadata))


def tell_of_log(names: Mapping[str, str], partition: int, log: str, found: Committed, start: Start) -> None:
    """Log that a log is not as it was; `names` are those of the topics, by log."""
    _log.error(explained(log, f"{names[log]}[{partition}]", found, start.fate))


def recovered_partition(
    committed: Mapping[str, Committed],
    ids: Mapping[str, str],
    done: DoneRead,
    tell: Callable[[str, Committed, Start], None],
) -> RecoveredPartition:
    """Return what a half partition starts from. Pure.

    Args:
        committed: how far each log was read, by log.
        ids: topic ids of the logs as they are now.
        done: what the done log says.
        tell: called for each log that is not as it was.
    """
    starts = starts_of(committed, ids)
    for log, start in starts.items():
        if start.fate is not Fate.INTACT:
            tell(log, committed[log], start)
    notes = done.notes
    # What it says of a log that is gone would be taken for the new one: offsets are given anew there.
    if starts[HALF].fate is Fate.ANEW:
        notes = [note._replace(half_offset=-1) for note in notes]
    if starts[OP].fate is Fate.ANEW:
        notes = [note._replace(op_offset=-1) for note in notes]
    # ReadyQueue on the new halves may have been read, and refused as unknown.
    op_position = committed[OP].low if starts[HALF].fate is Fate.ANEW else starts[OP].offset
    return RecoveredPartition(
        starts[HALF].offset,
        op_position,
        committed[HALF].end,
        committed[OP].end,
        notes,
        done.end,
        done.snapshots,
        starts[DONE].offset,
        {**known_ids(committed), **ids},
        sum(start.lost for start in starts.values()),
        starts[DONE].fate is not Fate.INTACT,
        len(done.unreadable),
    )


__all__ = [
    "DoneRead",
    "RecoveredPartition",
    "RecoveryReader",
    "Step",
    "committed_at",
    "recovered_partition",
    "tell_of_log",
]
