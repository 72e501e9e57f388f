"""Kafka transactions of a coordinator: what several partitions settle, made visible by one commit, or not at all.

Each Kafka transaction has the target messages, the completions (in `done`) and the half and op positions. The positions
are sent with the coordinator's group metadata, so that the broker refuses a coordinator that lost its partitions (a
zombie) before anything of it becomes visible. One that is tried apart from the others moves no positions: it sends one
that nobody reads, for the sake of that refusal.

A transaction that failed is not aborted: a successor under the same transactional id, which is made at once, has the
broker end it, and no end of the failed one can come late. `writing.writer` has the rest.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NoReturn

from confluent_kafka import KafkaError, KafkaException, TopicPartition

from penstock.clients.kafka_errors import is_missing_right, reason
from penstock.clients.rights import Operation, Right, group_right, topic_right, transactional_right
from penstock.clients.transactional.end_watch import UnknownEndError
from penstock.clients.transactional.errors import GivenUpError, NotOpenedError
from penstock.clients.transactional.missing_rights import MissingRights
from penstock.clients.transactional.pace import Pace
from penstock.clients.transactional.producer_settings import DELIVERY_S
from penstock.clients.transactional.writer import SENDS_POSITIONS, PublicationSpans, TransactionalWriter, Written
from penstock.errors import PenstockError
from penstock.options import ClientConfig
from penstock.transactions.coordinator.state.pending.pending import Pending, size_of
from penstock.transactions.coordinator.state.pending.ready_queue import CommitBatch
from penstock.transactions.wire.discarded import encode_discarded
from penstock.transactions.wire.done_records import Snapshot, encode_done
from penstock.transactions.wire.ops import Verdict
from penstock.transactions.wire.topics import StoreTopics

#: Seconds that initialising a producer may take.
_INIT_TIMEOUT_S = 15.0
#: Seconds after which messages that are not stored count as refused, where others of the batch are and brokers are
#: well: their topics are tried apart, with a longer limit.
_TRIED_APART_AFTER_S = 1.0
#: Completions in one done record: half a megabyte.
_NOTES_PER_RECORD = 8_000
#: Bytes of snapshots in one done record, about; one that is larger has a record of its own.
_SNAPSHOT_BYTES = 512 << 10

# A member of an enumeration is dear to look up, and this is the way of every transaction.
_COMMIT = Verdict.COMMIT


class NotPublishedError(PenstockError):
    """A Kafka transaction did not end in a known commit.

    Args:
        failed: ids of the transactions it was refused for, if it was them, each with the reason.
        targets: topics that could not take any message, each with the reason.
        too_large: ids of those that were refused for their size.
        rights: what the coordinator lacks for its own topics, group and ids, if that was the reason.
    """

    def __init__(
        self,
        text: str,
        failed: Mapping[str, str] = MappingProxyType({}),
        targets: Mapping[str, str] = MappingProxyType({}),
        too_large: Collection[str] = (),
        rights: Collection[Right] = (),
    ) -> None:
        super().__init__(text)
        self.too_large = too_large
        self.rights = rights
        self.failed = failed
        self.targets = targets


class AbortedError(NotPublishedError):
    """Nothing of a Kafka transaction is visible or ever will be: no end was sent that could commit it."""


class TooLargeError(AbortedError):
    """What was to be published together does not fit into the client's buffer."""


class InDoubtError(NotPublishedError):
    """It is not known whether a Kafka transaction was committed; the done log tells once a successor was opened."""


class Publisher:
    """A transactional writer of one coordinator, for as long as none of its transactions fails.

    Made, used and closed by one thread, which may be left behind in any call.

    Args:
        claim: returns what is written beside the half positions: who it was that committed them.
        apart: whether it tries what failed before, apart from the others: it produces the targets' messages first, and
            has nothing to do with the store's topics before those are stored.
    """

    def __init__(  # noqa: PLR0917 - all of them are what a producer is made of
        self,
        bootstrap_servers: str,
        config: ClientConfig,
        topics: StoreTopics,
        transactional_id: str,
        claim: Callable[[], str],
        rights: MissingRights,
        pace: Pace,
        apart: bool = False,
        spans: PublicationSpans | None = None,
    ) -> None:
        self._topics = topics
        self._claim = claim
        self._rights = rights
        self._apart = apart
        #: What it is doing now, for the log, and since when in monotonic seconds. Written by its thread, read by any.
        self.doing = ""
        self.since = 0.0
        self._ids_right = transactional_right(f"{topics.coordinators}.")
        self._writer = TransactionalWriter(
            bootstrap_servers,
            config,
            transactional_id,
            log_topic=topics.done,
            ids_right=self._ids_right,
            rights=rights,
            apart=apart,
            reports_all=False,
            step=self._do,
            pace=pace,
            spans=spans,
        )

    def open(self, free_s: float) -> None:
        """Make the producer and initialise it. The broker ends what a former producer of this id left open.

        For `free_s` seconds an id is asked for that the broker cannot free.

        Raises as `TransactionalWriter.open` does, but `InDoubtError` where the broker did not answer in time: try
        again.
        """
        try:
            self._writer.open(_INIT_TIMEOUT_S, free_s)
        except NotOpenedError as error:
            raise InDoubtError(str(error), rights=error.rights) from error
        self.doing = ""

    def _do(self, what: str) -> None:
        """Note what is done now."""
        self.since = time.monotonic()
        self.doing = what

    @property
    def is_spent(self) -> bool:
        """Whether it committed, and can only be closed: a late end of that may come."""
        return self._writer.is_spent

    @property
    def is_stuck(self) -> bool:
        """Whether it is in the call that ignores its time-out."""
        return self._writer.is_stuck

    @property
    def is_outpaced(self) -> bool:
        """Whether it was made for quicker brokers."""
        return self._writer.is_outpaced

    def give_up(self) -> bool:
        """Forbid the commit of what is under way; tell whether it had not begun: then it comes to nothing."""
        return self._writer.give_up()

    def close(self) -> None:
        """Discard the producer with all it holds."""
        self._writer.close()
        self.doing = ""

    def publish(self, batches: Mapping[int, CommitBatch], group_metadata: Any, produced: Callable[[], None]) -> None:
        """Settle what the partitions' batches hold in one Kafka transaction. After an error it can only be closed.

        The metadata is the coordinator's membership; `produced` is called when all is in the client library's hands.
        Raises `AbortedError` where nothing of it is visible or ever will be, and `InDoubtError` where nothing is known:
        open a successor, then ask the done log.
        """
        writer = self._writer
        try:
            writer.begin()
            for batch in batches.values():
                self._produce_decided(batch)
            if self._apart:
                produced()
                self._deliver(DELIVERY_S)
            for partition, batch in batches.items():
                self._produce_done(partition, batch)
            produced()
            writer.send_positions(self._positions(batches), group_metadata)
            self._deliver(DELIVERY_S if self._apart else _TRIED_APART_AFTER_S)
        except NotOpenedError as error:
            raise InDoubtError(str(error)) from error
        except KafkaException as error:
            self._fail(reason(error), error)
        except BufferError as error:
            raise TooLargeError("the client's buffer is full (queue.buffering.max.kbytes)") from error
        self._commit()

    def _deliver(self, limit_s: float) -> None:
        """Wait until all is stored. Where something is not, raise: committing would fail as well."""
        if not self._writer.deliver(limit_s):
            self._fail(self._writer.blame.cause)

    def _commit(self) -> None:
        """End the transaction with a commit."""
        try:
            self._writer.commit()
        except GivenUpError as error:
            raise AbortedError(str(error)) from error
        except UnknownEndError as error:
            if not error.is_committed:
                raise InDoubtError(str(error)) from error
        except KafkaException as error:
            # The broker refused the end, or none was sent.
            self._fail(reason(error), error)
        self.doing = ""
        positions = (topic_right(Operation.READ, log) for log in self._positioned())
        self._rights.granted(group_right(self._topics.coordinators), *positions)

    def _fail(self, cause: str, error: Exception | None = None) -> NoReturn:
        """Tell that the transaction came to nothing, and what it failed for."""
        writer, doing = self._writer, self.doing
        blame, not_let_in = writer.blame, writer.not_let_in()
        lacked = self._lacked(error, doing, has_refused=bool(not_let_in))
        if lacked:
            text = self._rights.refused("what is decided cannot be published", *lacked)
            raise AbortedError(text, rights=lacked) from error
        for topic, why in not_let_in.items():
            blame.topics[topic] = why
            blame.cause = f"{topic} takes no message: {why}"
        text = f"a Kafka transaction came to nothing: {blame.cause or cause}"
        writer.fail()
        if writer.has_log_failed:
            # The targets are not to blame.
            raise AbortedError(text) from error
        # What timed out stood behind what was refused.
        refused = {topic for topic, _ in blame.messages.values()}
        silent = {**blame.silent, **blame.topics}
        targets = {topic: why for topic, why in silent.items() if topic not in refused}
        failed = {transaction_id: why for transaction_id, (_, why) in blame.messages.items()}
        raise AbortedError(text, failed, targets, blame.too_large) from error

    def _lacked(self, error: Exception | None, doing: str, *, has_refused: bool) -> list[Right]:
        """Return what the coordinator has no right to among what is its own; what is of targets is no matter here."""
        if self._writer.is_log_forbidden:
            return [topic_right(Operation.WRITE, self._topics.done)]
        if has_refused or not isinstance(error, KafkaException) or not is_missing_right(error):
            return []
        code = error.args[0].code()
        if code == KafkaError.GROUP_AUTHORIZATION_FAILED:
            return [group_right(self._topics.coordinators)]
        if code == KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED:
            return [self._ids_right]
        if doing == SENDS_POSITIONS:
            # Who commits a position in a topic has to be allowed to read it. Which one it was stands in the text alone.
            logs = self._positioned()
            named = [log for log in logs if f"{log}(" in reason(error)]
            return [topic_right(Operation.READ, log) for log in named or logs]
        return []

    def _positioned(self) -> list[str]:
        """Return the topics in which it commits positions."""
        topics = self._topics
        return [topics.discarded] if self._apart else [topics.half, topics.op, topics.done]

    def _positions(self, batches: Mapping[int, CommitBatch]) -> list[TopicPartition]:
        if self._apart:
            return [TopicPartition(self._topics.discarded, partition, 0) for partition in batches]
        positions, claim = [], self._claim()
        for partition, batch in batches.items():
            beside = f"{claim} {batch.log_ids}".rstrip()
            positions.append(TopicPartition(self._topics.half, partition, batch.half_checkpoint, beside))
            positions.append(TopicPartition(self._topics.op, partition, batch.op_checkpoint, batch.log_ids))
            positions.append(TopicPartition(self._topics.done, partition, batch.done_checkpoint, batch.log_ids))
        return positions

    def _produce_decided(self, batch: CommitBatch) -> None:
        produce = self._writer.produce
        for pending in batch.decided:
            half = pending.half
            if pending.verdict is _COMMIT:
                messages = (half.message,) if pending.parts is None else [one.message for one in pending.halves]
                produce(half.transaction_id, messages)
            elif pending.verdict is Verdict.DISCARD:
                produce(pending.half.transaction_id, self._discarded(pending))

    def _discarded(self, pending: Pending) -> list[Written]:
        """Return the records of the discarded topic for a transaction."""
        to, why, checks = self._topics.discarded, pending.discard_reason, pending.check_count
        return [(to, None, half.key, half.value, encode_discarded(half, why, checks)) for half in pending.halves]

    def _produce_done(self, partition: int, batch: CommitBatch) -> None:
        notes = batch.notes()
        for start in range(0, len(notes), _NOTES_PER_RECORD):
            self._writer.produce_log(partition, encode_done(notes[start : start + _NOTES_PER_RECORD]))
        for snapshots in _in_records(batch.snapshots):
            self._writer.produce_log(partition, encode_done((), snapshots))


def _in_records(snapshots: Sequence[Snapshot]) -> Iterator[Sequence[Snapshot]]:
    """Yield what goes into one done record each."""
    group: list[Snapshot] = []
    size = 0
    for snapshot in snapshots:
        snapshotted = sum(size_of(half) for _, _, half in snapshot.halves)
        if group and size + snapshotted > _SNAPSHOT_BYTES:
            yield group
            group, size = [], 0
        group.append(snapshot)
        size += snapshotted
    if group:
        yield group
