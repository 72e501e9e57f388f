"""The publisher: runs the engine's Kafka transactions, each of which settles several partitions or nothing.

Each Kafka transaction has the target messages and the completions (in the store's done log). It may also have positions
of a consumer group with its metadata, as a proof of ownership. Then the broker refuses a zombie, which lost its
partitions, before anything becomes visible. In a store without such a group, the next owner fences the transactional
ids.

A failed transaction is not aborted. A successor under the same transactional id is made at once, and with it the broker
ends the failed transaction. So no late end of it can arrive. `clients.transactional.writer` does the rest.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from types import MappingProxyType
from typing import Any, NoReturn

from confluent_kafka import KafkaError, KafkaException, Message, TopicPartition

from penstock.clients.bounded_calls import LeftBehind
from penstock.clients.factory import AdminClient
from penstock.clients.kafka_errors import is_missing_right, reason
from penstock.clients.rights import Operation, Right, group_right, topic_right, transactional_right
from penstock.clients.topics import log_ends
from penstock.clients.transactional.end_watch import UnknownEndError
from penstock.clients.transactional.faults import GivenUpError, NotOpenedError
from penstock.clients.transactional.missing_rights import MissingRights
from penstock.clients.transactional.settings import Pace
from penstock.clients.transactional.writer import DELIVERY_S, SENDS_POSITIONS, PublicationSpans, TransactionalWriter
from penstock.errors import PenstockError
from penstock.options import ClientConfig
from penstock.transactions.core.commit_batch import DecidedBatch
from penstock.transactions.publishing.targets import Targets

_ANSWER_S = 2.0
_POLL_S = 0.002
_MAX_WAIT_S = 5.0
#: Seconds to wait for a partition with another producer's open transaction, and then to skip it.
_FOREIGN_TRANSACTION_WAIT_S = 0.1
_SKIPPED_S = 30.0

#: Topic and partition.
Place = tuple[str, int]


class Visibility:
    """Waits until read_committed readers see what one producer published. Used by one thread.

    `own` is the place that no other producer's transaction can hold up.
    """

    def __init__(self, admin: AdminClient, own: Place) -> None:
        self._admin = admin
        self._own = own
        # Places that other producers hold up, each with the monotonic second until which it is skipped.
        self._skipped: dict[Place, float] = {}

    def wait(self, written: Mapping[Place, int]) -> None:
        """Wait until everything is visible, given the last written offset of each place.

        It waits a few seconds at most: if brokers do not answer, only the commit is known. It does not wait for the end
        of other producers' transactions in the same partitions.
        """
        begun = time.monotonic()
        self._skipped = {place: until for place, until in self._skipped.items() if until > begun}
        left = {place: offset for place, offset in written.items() if place not in self._skipped}
        while left and (waited_s := time.monotonic() - begun) < _MAX_WAIT_S:
            try:
                left = self._unseen(left)
            except KafkaException:
                pass
            else:
                if self._own not in left and waited_s > _FOREIGN_TRANSACTION_WAIT_S:
                    self._skipped.update(dict.fromkeys(left, time.monotonic() + _SKIPPED_S))
                    return
            if left:
                time.sleep(_POLL_S)

    def _unseen(self, written: Mapping[Place, int]) -> dict[Place, int]:
        ends = log_ends(self._admin, list(written), _ANSWER_S)
        return {place: offset for place, offset in written.items() if ends[place] <= offset}


#: Seconds after which messages that are not stored count as refused, if others of the batch are stored and brokers are
#: well. Their topics are tried separately, with a longer limit.
_COMMON_DELIVERY_S = 1.0


@dataclass(frozen=True, slots=True)
class Proof:
    """Positions of a consumer group: with them, the broker refuses the Kafka transaction of a former member."""

    group: str
    group_metadata: Any
    positions: list[TopicPartition]

    @property
    def logs(self) -> list[str]:
        """The topics of the positions."""
        return list(dict.fromkeys(str(position.topic) for position in self.positions))


class NotPublishedError(PenstockError):
    """A Kafka transaction did not end in a known commit.

    Args:
        failed: ids of the transactions that caused it, each with the topic and the reason.
        targets: topics that could not take any message, each with the reason.
        rights: missing rights to the store's topics, group and ids, if they caused it.
    """

    def __init__(
        self,
        text: str,
        failed: Mapping[str, tuple[str, str]] = MappingProxyType({}),
        targets: Mapping[str, str] = MappingProxyType({}),
        rights: Collection[Right] = (),
    ) -> None:
        super().__init__(text)
        self.rights = rights
        self.failed = failed
        self.targets = targets

    @property
    def blamed(self) -> dict[str, str]:
        """The topics that caused it, each with the reason.

        The client library fails whole batches for one message. The guilty message shows only if each is a batch.
        """
        return {**dict(self.failed.values()), **self.targets}


class AbortedError(NotPublishedError):
    """Nothing of a Kafka transaction is or will be visible: no end was sent that could commit it."""


class TooLargeError(AbortedError):
    """The messages of a Kafka transaction do not fit into the client's buffer."""


class InDoubtError(NotPublishedError):
    """The outcome of a Kafka transaction is unknown. The done log tells, once a successor was opened."""


@dataclass(frozen=True, slots=True)
class PublishingClients:
    """The settings of Kafka clients, and the objects, that the engines of one coordinator share.

    Attributes:
        done_topic: the done log, with one partition for each partition of the store.
        discarded: the topic of discarded messages.
        ids_begin: the prefix of all transactional ids.
        left: counts abandoned threads.
        spans: returns the span factory of one publisher.
        wake: called by any thread when a call has ended.
    """

    bootstrap_servers: str
    config: ClientConfig = field(repr=False)
    done_topic: str
    discarded: str
    ids_begin: str
    rights: MissingRights
    pace: Pace
    targets: Targets
    left: LeftBehind
    spans: Callable[[], PublicationSpans | None] = lambda: None
    wake: Callable[[], object] = lambda: None


class Publisher:
    """A transactional writer of one engine, until one of its transactions fails.

    One thread makes, uses and closes it. That thread may be abandoned in any call.

    Args:
        is_trial: whether it is for trials. Then it first produces the targets' messages, and touches the store's topics
            only when those are stored.
        visibility: waits for watched transactions until read_committed readers see them. With it, deliveries are
            reported, and `publish` returns where the done logs ended.
    """

    def __init__(
        self, clients: PublishingClients, transactional_id: str, *, is_trial: bool, visibility: Visibility | None = None
    ) -> None:
        self._done_topic = clients.done_topic
        self._ids_right = transactional_right(clients.ids_begin)
        self._rights = clients.rights
        self._is_trial = is_trial
        self._visibility = visibility
        # Of the transaction under way: the proof of ownership, the last written offset of each place, and the ends of
        # the done logs. Delivery reports fill the latter two, on its thread.
        self._proof: Proof | None = None
        self._written: dict[Place, int] = {}
        self._done_ends: dict[int, int] = {}
        #: The owner opens and closes it on this thread. It reads its state, or gives it up, on any thread.
        self.writer = TransactionalWriter(
            clients.bootstrap_servers,
            clients.config,
            transactional_id,
            log_topic=clients.done_topic,
            ids_right=self._ids_right,
            rights=clients.rights,
            apart=is_trial,
            reports_all=visibility is not None,
            pace=clients.pace,
            spans=clients.spans(),
        )

    def publish(
        self, batches: Mapping[int, DecidedBatch], proof: Proof | None, produced: Callable[[], None]
    ) -> Mapping[int, int]:
        """Publish and settle the partitions' batches in one Kafka transaction. After an error it can only be closed.

        Calls `produced` when the client library has all records. Returns the ends of the done logs by partition, if
        deliveries are reported. Raises `AbortedError` if nothing is or will be visible. Raises `InDoubtError` if the
        outcome is unknown: open a successor, then read the done log.
        """
        writer = self.writer
        self._proof, self._written, self._done_ends = proof, {}, {}
        is_watched = self._visibility is not None and any(batch.is_watched for batch in batches.values())
        try:
            writer.begin()
            self._produce(batches, produced, is_watched=is_watched)
            if proof is not None:
                writer.send_positions(proof.positions, proof.group_metadata)
            self._deliver(DELIVERY_S if self._is_trial else _COMMON_DELIVERY_S)
        except NotOpenedError as error:
            raise InDoubtError(str(error)) from error
        except KafkaException as error:
            self._fail(reason(error), error)
        except BufferError as error:
            raise TooLargeError("the client's buffer is full (queue.buffering.max.kbytes)") from error
        self._commit()
        if is_watched and self._visibility is not None:
            writer.step("waiting until it is visible")
            self._visibility.wait(self._written)
        return self._done_ends

    def _produce(self, batches: Mapping[int, DecidedBatch], produced: Callable[[], None], *, is_watched: bool) -> None:
        """Pass messages and completions to the client library."""
        writer, delivered = self.writer, self._note if is_watched else None
        for batch in batches.values():
            writer.produce(batch.messages(), delivered)
        if self._is_trial:
            produced()
            self._deliver(DELIVERY_S)
        for partition, batch in batches.items():
            for record in batch.records():
                writer.produce_log(partition, record, partial(self._note_done, is_watched))
        produced()

    def _note(self, message: Message) -> None:
        place = str(message.topic()), int(message.partition() or 0)
        self._written[place] = max(int(message.offset() or 0), self._written.get(place, 0))

    def _note_done(self, is_watched: bool, message: Message) -> None:
        partition, end = int(message.partition() or 0), int(message.offset() or 0) + 1
        self._done_ends[partition] = max(end, self._done_ends.get(partition, 0))
        if is_watched:
            self._note(message)

    def _deliver(self, limit_s: float) -> None:
        """Wait until all records are stored. Raise if one is not: the commit would fail too."""
        if not self.writer.deliver(limit_s):
            self._fail(self.writer.blame.cause)

    def _commit(self) -> None:
        """End the transaction with a commit."""
        try:
            self.writer.commit()
        except GivenUpError as error:
            raise AbortedError(str(error)) from error
        except UnknownEndError as error:
            if not error.is_committed:
                raise InDoubtError(str(error)) from error
        except KafkaException as error:
            # The broker refused the end, or no end was sent.
            self._fail(reason(error), error)
        proof = self._proof
        if proof is not None:
            self._rights.granted(group_right(proof.group), *(topic_right(Operation.READ, log) for log in proof.logs))

    def _fail(self, cause: str, error: Exception | None = None) -> NoReturn:
        """Raise the error of a failed transaction, with its cause."""
        writer, doing = self.writer, self.writer.doing
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
        if blame.has_log_failed:
            # Not the targets' fault.
            raise AbortedError(text) from error
        # A message that timed out was behind a refused one of its topic.
        refused = {topic for topic, _ in blame.messages.values()}
        silent = {**blame.silent, **blame.topics}
        targets = {topic: why for topic, why in silent.items() if topic not in refused}
        raise AbortedError(text, blame.messages, targets) from error

    def _lacked(self, error: Exception | None, doing: str, *, has_refused: bool) -> list[Right]:
        """Return the coordinator's missing rights to the store's own topics, group and ids, not to targets."""
        if self.writer.is_log_forbidden:
            return [topic_right(Operation.WRITE, self._done_topic)]
        if has_refused or not isinstance(error, KafkaException) or not is_missing_right(error):
            return []
        code, proof = error.args[0].code(), self._proof
        if code == KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED:
            return [self._ids_right]
        if proof is not None and code == KafkaError.GROUP_AUTHORIZATION_FAILED:
            return [group_right(proof.group)]
        if proof is not None and doing == SENDS_POSITIONS:
            # Committing a position in a topic needs Read on it. Only the error's text names the topic.
            named = [log for log in proof.logs if f"{log}(" in reason(error)]
            return [topic_right(Operation.READ, log) for log in named or proof.logs]
        return []
