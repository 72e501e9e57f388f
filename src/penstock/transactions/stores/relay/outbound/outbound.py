"""Exactly-once publication into Kafka from a store that is not in Kafka: a database, a file.

Such a store cannot put "published" and the messages into one transaction. So each Kafka transaction has, beside the
messages, the ids of what it publishes, in a log of its own: `done`. What the store still holds as committed is
published unless `done` has it; and nobody else can be writing there, since whoever opens an `Outbound` fences its
predecessor, whose open transaction is ended by then. The order that makes this hold is the store's to keep:

1. `open()`: the predecessor is shut out, and what it published, and the store may not know of, is returned.
2. The store marks those as published, durably.
3. Only now it reads what is to be published, making sure in the same step that it still owns the shard.
4. `publish()`, then the store marks what was published, durably; now and then `forget()`.
5. After `InDoubtError`: make sure of the ownership, and start again at 1.

A process that dies anywhere leaves the next one at 1. One that was thought dead and goes on after another has opened is
refused by the broker.

A transaction that failed is aborted by its own producer, which is fenced where a successor has opened meanwhile. Then
it is not used again (see `clients.transactional.writer`): the next one of the transactional ids takes over, and another
is made ready (see `writer_pool`). Where none is left, it has to be opened again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence

from confluent_kafka import KafkaError, KafkaException, Message

from penstock.clients.kafka_errors import is_missing_right, reason
from penstock.clients.rights import Operation, topic_right, transactional_right
from penstock.clients.transactional.end_watch import UnknownEndError
from penstock.clients.transactional.errors import NotOpenedError
from penstock.clients.transactional.faults import Blame, Fault
from penstock.clients.transactional.missing_rights import MissingRights
from penstock.clients.transactional.pace import Pace
from penstock.clients.transactional.producer_settings import DELIVERY_S
from penstock.clients.transactional.writer import PublicationSpans, TransactionalWriter
from penstock.errors import PenstockError
from penstock.options import ClientConfig
from penstock.transactions.stores.relay.outbound.done_log import DoneLog, encode_ids
from penstock.transactions.stores.relay.outbound.target_probe import ASK_S, TargetProbe
from penstock.transactions.stores.relay.outbound.writer_pool import WriterPool
from penstock.transactions.stores.relay.publishable import Outcome, Publishable, divide
from penstock.transactions.writing.visibility import Place, Visibility

_log = logging.getLogger("penstock.transactions")

#: Seconds to wait for room in the client's buffer.
_ROOM_S = 10.0
#: Seconds after which it is looked what a transaction waits for, and between two looks.
_LOOK_S = 1.5
#: Seconds after which another id is used, where the last transaction still waits for its markers: they wait while the
#: leader of a partition is away, which no other id helps against. And seconds after which the brokers are asked once
#: whether a topic takes none, for then that need not be waited for. Usual are milliseconds.
_MARKERS_S = 5.0
_ASK_FOR_MARKERS_S = 0.1
#: Seconds until another transactional id is tried again, while there is one.
_REFILL_S = 10.0
#: Ids in one record of the done log: an eighth of a megabyte.
_IDS_PER_RECORD = 8_000


class InDoubtError(PenstockError):
    """It is not known what became of a Kafka transaction, or who publishes now: make sure of that and `open` again."""

    def __init__(self, text: str, faults: Mapping[str, Fault] | None = None) -> None:
        super().__init__(text)
        #: Of the topics that are to blame for it.
        self.faults: Mapping[str, Fault] = faults or {}


class _MarkersMissingError(Exception):
    """The last transaction of the producer waits for its markers. Nothing of the one begun since was sent."""


class Outbound:
    """Publishes what one shard of a store holds. Used by one thread at a time.

    A shard has two: one for all that is well, where all messages of a transaction and the done log go out together, and
    one (`apart`) for what was refused before. There messages go out one by one, so that a refusal names the very
    message, and the done log is written once they were taken: a trial that fails holds none of its readers back.

    The transactional id is the same for every owner of the shard, and no other's. What right is missing for that id and
    the done log is noted in `rights`; without them in the program's log alone.
    """

    def __init__(
        self,
        bootstrap_servers: str,
        config: ClientConfig,
        *,
        transactional_id: str,
        done: DoneLog,
        apart: bool = False,
        rights: MissingRights | None = None,
        pace: Pace | None = None,
        spans: PublicationSpans | None = None,
    ) -> None:
        self._rights = MissingRights(config) if rights is None else rights
        self._apart = apart
        self._done = done
        self._name = transactional_id
        # What the ids of all shards of the store begin with.
        ids_right = transactional_right(done.topic.removesuffix(".done"))
        self._pool = WriterPool(
            bootstrap_servers,
            config,
            name=transactional_id,
            done=done,
            ids_right=ids_right,
            rights=self._rights,
            apart=apart,
            step=self._goes_on,
            pace=pace or Pace(),
            spans=spans,
        )
        self._visibility = Visibility(done.admin, (done.topic, done.partition))
        self._probe = TargetProbe(done.admin, self._why)
        # Topics that were there when they were first published to.
        self._found: set[str] = set()
        # Of the transaction under way: written by delivery reports, on the thread that publishes.
        #: The last offset that was written, by place. Empty unless somebody waits to see it.
        self._written: dict[Place, int] = {}
        self._notes_places = False
        self._done_offset: int | None = None
        #: All of the done log below this offset was read by `open`, or written by this one and ended.
        self.known_to = 0
        #: Monotonic seconds at which the call under way last went on, and the call of the client that it has made
        #: since, if any. Read by others.
        self.active_at = time.monotonic()
        self.doing = ""
        #: Kafka transactions committed.
        self.groups = 0
        self._refill_at = 0.0
        #: Times it was opened.
        self.opened = 0

    @property
    def is_open(self) -> bool:
        """Whether there is a producer to publish with."""
        return self._pool.has_writer()

    def _goes_on(self, step: str = "") -> None:
        self.doing, self.active_at = step, time.monotonic()

    def open(self, shut_out: Sequence[str] = ()) -> frozenset[str]:
        """Shut every other publisher of the shard out, and return the ids that were published and not forgotten yet.

        The owners of other transactional ids (`shut_out`) are shut out, too, before the done log is read. Raises
        `InDoubtError` where the broker did not answer in time: nothing is open, try again.
        """
        self.close()
        try:
            for other in shut_out:
                self._pool.shut_out(other)
            # What the predecessor left open is ended, and its markers are written, when this returns.
            self._pool.open()
            self._goes_on()
            self.known_to, found = self._done.read(self._goes_on)
            self._refill()
        except NotOpenedError as error:
            self.close()
            raise InDoubtError(f"{error}; trying again helps") from error
        except (KafkaException, TimeoutError) as error:
            self.close()
            cause = reason(error) if isinstance(error, KafkaException) else error
            if isinstance(error, KafkaException) and is_missing_right(error):
                right = topic_right(Operation.READ, self._done.topic)
                cause = self._rights.refused("it cannot be read what was published", right)
            raise InDoubtError(f"{self._name} cannot open: {cause}; trying again helps") from error
        except BaseException:
            self.close()
            raise
        if not self._pool.has_writer():
            self.close()
            raise InDoubtError(f"{self._name} cannot open: it has no transactional id; trying again helps")
        self.opened += 1
        return found

    def close(self) -> None:
        """Discard the producers with all they hold."""
        self._found.clear()
        self._pool.close()

    def _refill(self) -> None:
        """Have a writer ready for each that was given up. Raises `InDoubtError` where somebody else may publish now.

        Nothing may be under way of those: their successors do not shut them out.
        """
        now = time.monotonic()
        if self._pool.has_writer() and now < self._refill_at:
            return
        try:
            self._pool.refill()
        except NotOpenedError as error:
            self._refill_at = now + _REFILL_S
            _log.warning("%s; it is tried again", error)
        except UnknownEndError as error:
            raise InDoubtError(f"{self._name}: {error}") from error

    def publish(self, entries: Iterable[Publishable], *, until_visible: bool = False) -> Outcome:
        """Publish transactions in their order, in as few Kafka transactions as it takes.

        What is refused is set apart, and what must not pass it waits behind it; the others are published. Where only
        some messages of a topic are refused, all of that topic is set apart, for nobody knows which they were; save in
        the one for what is tried apart. `until_visible`: return when readers of committed records can see it.

        After an `InDoubtError` nothing is known of some of them, and it is closed; `open` tells what was published.
        """
        outcome = Outcome()
        self._notes_places = until_visible
        try:
            if not self._pool.has_writer():
                raise InDoubtError(f"{self._name} is not open")  # noqa: TRY301 - closed as for the others
            left = self._without_missing(list(entries), outcome)
            while left and self._pool.has_writer():
                left = self._try(left, outcome)
                if not self._pool.has_writer():
                    self._refill()
            self._refill()
            # Nothing of these was sent.
            outcome.held.extend(entry.transaction_id for entry in left)
        except InDoubtError:
            self.close()
            raise
        outcome.is_spent = not self._pool.has_writer()
        return outcome

    def _try(self, entries: list[Publishable], outcome: Outcome) -> list[Publishable]:
        """Run one Kafka transaction with all of them; return those that are left for another one."""
        writer = self._pool.writer
        try:
            blame = self._transaction(writer, entries)
        except _MarkersMissingError:
            return divide(entries, {}, self._with_another_id(entries, {}), outcome)
        if blame is None:
            outcome.published.extend(entry.transaction_id for entry in entries)
            if writer.is_spent:
                # A late end of it may come, which the next one of that id shuts out.
                self.close()
            return []
        faults, refused = self._faults(writer, blame), {}
        if self._apart:
            refused = {transaction_id: why for transaction_id, (_, why) in blame.messages.items()}
        self._found.difference_update(faults)
        if self._probe.take_no_markers([topic for topic, _ in blame.messages.values()]):
            faults = self._with_another_id(entries, faults)
        else:
            self._pool.drop()
        left = divide(entries, refused, faults, outcome)
        if len(left) == len(entries) or blame.silent:
            # Nobody is to blame; or what was sent and not acknowledged may still arrive, and only a new epoch of the
            # same id keeps it out.
            raise InDoubtError(f"{self._name}: a Kafka transaction was aborted: {blame.cause}", outcome.faults)
        return left

    def forget(self, offset: int | None = None) -> None:
        """Let the done log go below an offset, or as far as it is known: all there is marked durably in the store."""
        below = self.known_to if offset is None else offset
        try:
            self._pool.keep_announced(below)
        except UnknownEndError as error:
            self.close()
            raise InDoubtError(f"{self._name}: {error}") from error
        self._done.forget(below)

    def _without_missing(self, entries: list[Publishable], outcome: Outcome) -> list[Publishable]:
        """Set apart what is for topics that are not there, before it costs a transaction."""
        topics = {message.topic for entry in entries for message in entry.messages}
        new = topics if self._apart else topics - self._found
        if not new:
            return entries
        self._goes_on()
        faults = self._probe.missing(self._pool.writer.producer, new)
        self._found |= new - faults.keys()
        if self._apart:
            faults.update(self._probe.take_no_markers(new - faults.keys()))
        return divide(entries, {}, faults, outcome) if faults else entries

    def _with_another_id(self, entries: list[Publishable], faults: Mapping[str, Fault]) -> dict[str, Fault]:
        """Go on with another transactional id: nothing can be done with this one until a topic takes its markers.

        Nothing is in doubt: the transaction that waits for them was aborted, or its commit was acknowledged. And
        whoever shuts this publisher out takes all ids. (A healthy one may wait, too, and for ever: Kafka forgets to
        complete those whose markers were sent together with one that a topic did not take.)

        Returns the faults, and those of all topics of the entries that take no markers. Raises `InDoubtError` where
        there is no other id.
        """
        topics = {message.topic for entry in entries for message in entry.messages}
        found = {**faults, **self._probe.take_no_markers(topics | self._found)}
        why = f"{self._name}: its last transaction does not end: its markers are not taken"
        self._pool.drop()
        if not self._pool.has_writer():
            raise InDoubtError(why, found)
        _log.warning("%s; it goes on with another transactional id", why)
        return found

    def _faults(self, writer: TransactionalWriter, blame: Blame) -> dict[str, Fault]:
        """Return which topics are to blame for an abort. Brokers that do not answer are nobody's fault."""
        named = {**writer.not_let_in(), **blame.topics}
        if blame.silent and self._brokers_answer(writer):
            named.update(blame.silent)
        faults = {topic: Fault(f"{topic}: {why}", whole=True) for topic, why in named.items()}
        if not self._apart:
            for topic, why in blame.messages.values():
                faults.setdefault(topic, Fault(why, whole=False))
        return faults

    def _brokers_answer(self, writer: TransactionalWriter) -> bool:
        self._goes_on()
        try:
            writer.producer.list_topics(self._done.topic, timeout=ASK_S)
        except KafkaException:
            return False
        # What went into the done log went out together with the rest, and that log is well.
        return self._apart or self._done_offset is not None

    def _transaction(self, writer: TransactionalWriter, group: list[Publishable]) -> Blame | None:
        """Run one Kafka transaction; return None when it is committed, or why it was aborted."""
        self._done_offset, self._written = None, {}
        topics = {message.topic for entry in group for message in entry.messages}
        note = self._note if self._notes_places else None
        try:
            writer.begin()
            for entry in group:
                writer.produce(entry.transaction_id, entry.messages, note, room_s=_ROOM_S)
            if not self._apart or self._deliver(writer, topics):
                self._produce_done(writer, [entry.transaction_id for entry in group])
                if self._deliver(writer, topics):
                    self._commit(writer)
                    self._await_visible()
                    return None
        except (KafkaException, BufferError) as error:
            writer.blame.cause = writer.blame.cause or (
                reason(error) if isinstance(error, KafkaException) else str(error)
            )
        blame = writer.blame
        try:
            writer.abort()
        except UnknownEndError as error:
            faults = self._faults(writer, blame)
            raise InDoubtError(f"{self._name}: {error}, after: {blame.cause}", faults) from error
        if writer.is_log_forbidden:
            right = topic_right(Operation.WRITE, self._done.topic)
            blame.cause = self._rights.refused("what is decided cannot be published", right)
        return blame

    def _deliver(self, writer: TransactionalWriter, topics: set[str]) -> bool:
        """Wait until all is delivered or something failed: what comes behind a failed message would time out.

        Raises `_MarkersMissingError` where the transaction before does not end.
        """
        look_at_s, is_asked = _LOOK_S, False

        def look(waited_s: float) -> None:
            nonlocal look_at_s, is_asked
            self._goes_on()
            if waited_s > _ASK_FOR_MARKERS_S and writer.waits_for_markers:
                asks, is_asked = not is_asked, True
                if waited_s > _MARKERS_S or (asks and self._probe.take_no_markers(topics | self._found)):
                    raise _MarkersMissingError
            if waited_s > look_at_s and not writer.blame.cause:
                look_at_s += _LOOK_S
                for topic, fault in self._probe.missing(writer.producer, topics).items():
                    writer.blame.topics[topic] = fault.why.removeprefix(f"{topic}: ")
                    writer.blame.cause = fault.why

        return writer.deliver(DELIVERY_S + 1, look)

    def _await_visible(self) -> None:
        if self._notes_places and self._done_offset is not None:
            self._goes_on()
            self._visibility.wait(self._written)

    def _produce_done(self, writer: TransactionalWriter, ids: list[str]) -> None:
        for start in range(0, len(ids), _IDS_PER_RECORD):
            value = encode_ids(ids[start : start + _IDS_PER_RECORD])
            writer.produce_log(self._done.partition, value, self._done_written, room_s=_ROOM_S)

    def _done_written(self, message: Message) -> None:
        self._done_offset = message.offset()
        if self._notes_places:
            self._note(message)

    def _note(self, message: Message) -> None:
        place = str(message.topic()), int(message.partition() or 0)
        self._written[place] = max(int(message.offset() or 0), self._written.get(place, 0))

    def _why(self, topic: str, error: KafkaError) -> str:
        lacks = self._rights.lacks
        return lacks(topic_right(Operation.WRITE, topic)) if is_missing_right(error) else reason(error)

    def _commit(self, writer: TransactionalWriter) -> None:
        try:
            writer.commit()
        except UnknownEndError as error:
            if not error.is_committed:
                raise InDoubtError(f"{self._name}: {error}") from error
        self.groups += 1
        if self._done_offset is not None:
            self.known_to = self._done_offset + 1
