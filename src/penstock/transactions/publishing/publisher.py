"""Kafka transactions of the engine: what several partitions settle, made visible by one commit, or not at all.

Each Kafka transaction has the target messages, the completions (in the store's done log) and, where a store proves its
ownership so, positions of a consumer group with its metadata: then the broker refuses who lost its partitions (a
zombie) before anything of it becomes visible. Where a store has no such group, its transactional ids are shut out by
the next owner.

A transaction that failed is not aborted: a successor under the same transactional id, which is made at once, has the
broker end it, and no end of the failed one can come late. `clients.transactional.writer` has the rest.
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
_LONGEST_S = 5.0
#: A partition where somebody else's transaction stays open is waited for so long, and then not for a while.
_FOREIGN_TRANSACTION_WAIT_S = 0.1
_SKIPPED_S = 30.0

#: Topic and partition.
Place = tuple[str, int]


class Visibility:
    """Waits until readers of committed records see what one producer published. Used by one thread.

    `own` is the place that nobody else holds up.
    """

    def __init__(self, admin: AdminClient, own: Place) -> None:
        self._admin = admin
        self._own = own
        # Places that were held up by others, each with the monotonic second at which it is waited for again.
        self._skipped: dict[Place, float] = {}

    def wait(self, written: Mapping[Place, int]) -> None:
        """Wait until all is visible, given the last offset that was written in each place.

        It waits no longer than some seconds: where brokers do not answer, that it was committed is all there is to
        tell. Nor does it wait for the end of transactions of others in the same partitions.
        """
        begun = time.monotonic()
        self._skipped = {place: until for place, until in self._skipped.items() if until > begun}
        left = {place: offset for place, offset in written.items() if place not in self._skipped}
        while left and (waited_s := time.monotonic() - begun) < _LONGEST_S:
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


#: Seconds after which messages that are not stored count as refused, where others of the batch are and brokers are
#: well: their topics are tried apart, with a longer limit.
_TRIED_ALONE_AFTER_S = 1.0


@dataclass(frozen=True, slots=True)
class Proof:
    """Positions of a consumer group: with them, the broker refuses a Kafka transaction of who is no member any more."""

    group: str
    group_metadata: Any
    positions: list[TopicPartition]

    @property
    def logs(self) -> list[str]:
        """The topics in which positions are committed."""
        return list(dict.fromkeys(str(position.topic) for position in self.positions))


class NotPublishedError(PenstockError):
    """A Kafka transaction did not end in a known commit.

    Args:
        failed: ids of the transactions it was refused for, if it was them, each with the topic and the reason.
        targets: topics that could not take any message, each with the reason.
        rights: what the coordinator lacks for its own topics, group and ids, if that was the reason.
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
        """The topics that it failed for, each with the reason.

        The library fails whole batches for one message: who it is shows where each is a batch.
        """
        return {**dict(self.failed.values()), **self.targets}


class AbortedError(NotPublishedError):
    """Nothing of a Kafka transaction is visible or ever will be: no end was sent that could commit it."""


class TooLargeError(AbortedError):
    """What was to be published together does not fit into the client's buffer."""


class InDoubtError(NotPublishedError):
    """It is not known whether a Kafka transaction was committed; the done log tells once a successor was opened."""


@dataclass(frozen=True, slots=True)
class PublishingClients:
    """What the engines of one coordinator make their Kafka clients of, and what they share.

    Attributes:
        done_topic: the log of what was settled, in which each partition of the store has one.
        discarded: the topic of what is discarded.
        ids_begin: what all transactional ids begin with.
        left: counts threads that are abandoned.
        spans: makes what makes the spans of one publisher.
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
    """A transactional writer of one engine, for as long as none of its transactions fails.

    Made, used and closed by one thread, which may be abandoned in any call.

    Args:
        apart: whether it tries what failed before, apart from the others: it produces the targets' messages first, and
            has nothing to do with the store's topics before those are stored.
        visibility: makes it wait until committed readers see what somebody waits for; then deliveries are reported,
            and `publish` returns where the done log ended.
    """

    def __init__(
        self, clients: PublishingClients, transactional_id: str, *, apart: bool, visibility: Visibility | None = None
    ) -> None:
        self._done_topic = clients.done_topic
        self._ids_right = transactional_right(clients.ids_begin)
        self._rights = clients.rights
        self._apart = apart
        self._visibility = visibility
        # Of the transaction under way: what proves the ownership, the last offset that was written in each place, and
        # where the done log ended. The latter two are filled by delivery reports, on its thread.
        self._proof: Proof | None = None
        self._written: dict[Place, int] = {}
        self._done_ends: dict[int, int] = {}
        #: Its owner opens and closes it on this thread, and asks how it stands, or gives it up, from any.
        self.writer = TransactionalWriter(
            clients.bootstrap_servers,
            clients.config,
            transactional_id,
            log_topic=clients.done_topic,
            ids_right=self._ids_right,
            rights=clients.rights,
            apart=apart,
            reports_all=visibility is not None,
            pace=clients.pace,
            spans=clients.spans(),
        )

    def publish(
        self, batches: Mapping[int, DecidedBatch], proof: Proof | None, produced: Callable[[], None]
    ) -> Mapping[int, int]:
        """Settle what the partitions' batches hold in one Kafka transaction. After an error it can only be closed.

        `produced` is called when all is in the client library's hands. Returns where the done logs ended, by partition,
        where deliveries are reported. Raises `AbortedError` where nothing of it is visible or ever will be, and
        `InDoubtError` where nothing is known: open a successor, then ask the done log.
        """
        writer = self.writer
        self._proof, self._written, self._done_ends = proof, {}, {}
        is_watched = self._visibility is not None and any(batch.is_watched for batch in batches.values())
        try:
            writer.begin()
            self._produce(batches, produced, is_watched=is_watched)
            if proof is not None:
                writer.send_positions(proof.positions, proof.group_metadata)
            self._deliver(DELIVERY_S if self._apart else _TRIED_ALONE_AFTER_S)
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
        """Hand messages and completions to the client library."""
        writer, delivered = self.writer, self._note if is_watched else None
        for batch in batches.values():
            for transaction_id, messages in batch.messages():
                writer.produce(transaction_id, messages, delivered)
        if self._apart:
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
        """Wait until all is stored. Where something is not, raise: committing would fail as well."""
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
            # The broker refused the end, or none was sent.
            self._fail(reason(error), error)
        proof = self._proof
        if proof is not None:
            self._rights.granted(group_right(proof.group), *(topic_right(Operation.READ, log) for log in proof.logs))

    def _fail(self, cause: str, error: Exception | None = None) -> NoReturn:
        """Tell that the transaction came to nothing, and what it failed for."""
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
            # The targets are not to blame.
            raise AbortedError(text) from error
        # What timed out stood behind what was refused.
        refused = {topic for topic, _ in blame.messages.values()}
        silent = {**blame.silent, **blame.topics}
        targets = {topic: why for topic, why in silent.items() if topic not in refused}
        raise AbortedError(text, blame.messages, targets) from error

    def _lacked(self, error: Exception | None, doing: str, *, has_refused: bool) -> list[Right]:
        """Return what the coordinator has no right to among what is its own; what is of targets is no matter here."""
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
            # Who commits a position in a topic has to be allowed to read it. Which one it was stands in the text alone.
            named = [log for log in proof.logs if f"{log}(" in reason(error)]
            return [topic_right(Operation.READ, log) for log in named or proof.logs]
        return []
