"""Exactly-once publication into Kafka from a store that is not in Kafka: a database, a file.

Such a store cannot put "published" and the messages into one transaction. So each Kafka transaction carries, beside the
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
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, cast

from confluent_kafka import KafkaError, KafkaException, Message, Producer
from confluent_kafka.admin import ConfigResource, ResourceType  # type: ignore[attr-defined] # not in its __all__

from penstock import clients
from penstock.clients.kafka import hidden_topics, reason
from penstock.clients.rights import Operation, Right, is_missing_right, topic_right, transactional_right
from penstock.errors import PenstockError
from penstock.options import ClientConfig
from penstock.transactions.stores.relay.done_log import DoneLog, encode_ids
from penstock.transactions.wire.half import Line
from penstock.transactions.writing.end_watch import CONTEXT, EndWatch, UnknownEndError
from penstock.transactions.writing.faults import AddWatch, Blamed, Fault, blamed, is_forbidden
from penstock.transactions.writing.missing_rights import MissingRights
from penstock.transactions.writing.visibility import Place, Visibility

_log = logging.getLogger("penstock.transactions")

#: A process that dies in a transaction holds readers back no longer than this, or until its successor opens.
_TIMEOUT_S = 10.0
#: Less, so that a topic that does not answer is known before the transaction times out.
_SEND_TIMEOUT_S = 6.0
_OPEN_TIMEOUT_S = 5.0
#: Seconds that an end may take; after it, a producer anew is the shorter way.
_END_TIMEOUT_S = 5.0
#: Seconds for a transactional id whose last transaction may wait for its markers.
_ID_TIMEOUT_S = 2.0
#: Transactional ids that stand for one.
_IDS = 3
#: What a topic must take at least: a marker has fewer bytes.
_MARKER_BYTES = 200
_POLL_S = 0.1
#: Seconds after which it is looked what a transaction waits for, and between two looks.
_LOOK_S = 1.5
#: Seconds after which another id is used, where the last transaction still waits for its markers. Usual are
#: milliseconds.
_MARKERS_S = 0.5
#: Seconds before an abort, seen with librdkafka 2.16.
_CLEARING_S = 0.3
#: Seconds for a question whether brokers answer, and know a topic.
_ASK_S = 2.0
#: Topics that are asked for one by one; more are asked for in one question for all.
_ONE_BY_ONE = 3
#: Ids in one record of the done log: an eighth of a megabyte.
_IDS_PER_RECORD = 8_000


class InDoubtError(PenstockError):
    """It is not known what became of a Kafka transaction, or who publishes now: make sure of that and `open` again.

    Args:
        text: what happened.
        faults: topics that are to blame for it.
    """

    def __init__(self, text: str, faults: Mapping[str, Fault] | None = None) -> None:
        super().__init__(text)
        self.faults: Mapping[str, Fault] = faults or {}


class _IdLostError(Exception):
    """The last transaction of the producer waits for its markers. Nothing of the one begun since was sent."""


class OutboundMessage(NamedTuple):
    """A message as it is published."""

    topic: str
    #: None: Kafka's partitioner chooses.
    partition: int | None
    key: bytes | None
    value: bytes | None
    headers: Sequence[tuple[str, bytes | None]]

    def __repr__(self) -> str:
        """Name the topic, never the key or the value."""
        return f"<OutboundMessage for {self.topic}>"


class Publishable(NamedTuple):
    """A transaction to publish: all its messages or none."""

    #: Its name in the done log.
    transaction_id: str
    messages: Sequence[OutboundMessage]
    #: Of those that share it, a later one is not published before an earlier one. None: order does not matter.
    line: Line | None
    #: Where it was discarded: the name under which it would have been published.
    discards: str | None = None

    def __repr__(self) -> str:
        """Name the transaction, never a key or a value."""
        return f"<Publishable {self.transaction_id}>"

    @property
    def topics(self) -> tuple[str, ...]:
        """The topics of its messages."""
        return tuple(dict.fromkeys(message.topic for message in self.messages))


def lanes_of(entry: Publishable) -> tuple[int, ...]:
    """Return what a transaction shares with those that it must not pass: a number for each key and topic, and line."""
    if entry.discards is not None:
        # The discarded topic has no order.
        return ()
    lanes = [hash((message.topic, message.key)) for message in entry.messages if message.key is not None]
    if entry.line is not None:
        lanes.append(hash(entry.line))
    return tuple(lanes)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of transactions that were to be published. Each is in one of the first three.

    Attributes:
        published: names of those that are committed, in their order.
        refused: those that cannot be published now, by name, each with the reason. Nothing of them is visible.
        held: names of those that wait, for one that was refused or because the broker has trouble. Nothing of them is
            visible.
        faults: topics that are to blame; of those that were refused for none of them, the message itself is.
    """

    published: list[str] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)
    held: list[str] = field(default_factory=list)
    faults: dict[str, Fault] = field(default_factory=dict)


@dataclass(slots=True)
class _Blame:
    """Why a Kafka transaction was aborted. By transaction: topic and reason; by topic: the reason."""

    messages: dict[str, tuple[str, str]] = field(default_factory=dict)
    topics: dict[str, str] = field(default_factory=dict)
    silent: dict[str, str] = field(default_factory=dict)
    #: Why it is waited for no longer.
    cause: str = ""


class Outbound:
    """Publishes what one shard of a store holds. Used by one thread at a time.

    A shard has two: one for all that is well, where all messages of a transaction and the done log go out together, and
    one (`apart`) for what was refused before. There messages go out one by one, so that a refusal names the very
    message, and the done log is written once they were taken: a trial that fails holds none of its readers back.

    Args:
        bootstrap_servers: Kafka's addresses.
        config: client settings by librdkafka's names.
        transactional_id: the same for every owner of the shard, and no other's.
        done: the shard's own done log.
        apart: whether it tries what was refused.
        rights: where it is noted what is missing for its own id and log; None: in the log alone.
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
    ) -> None:
        self._rights = MissingRights(config) if rights is None else rights
        debug = str(config.get("debug", ""))
        self._watch = EndWatch(clients.log_of(config), debugging=bool(debug))
        self._added = AddWatch(self._watch)
        self._bootstrap_servers = bootstrap_servers
        self._settings: dict[str, Any] = {
            "linger.ms": 1,
            "message.max.bytes": 100_000_000,
            "queue.buffering.max.messages": 1_000_000,
            "message.timeout.ms": int(_SEND_TIMEOUT_S * 1000),
            # As in `publisher`: the waits after CONCURRENT_TRANSACTIONS would be the latency of everything.
            "retry.backoff.ms": 1,
            "retry.backoff.max.ms": 5,
            "topic.metadata.propagation.max.ms": 3_000,
            **config,
            "transactional.id": transactional_id,
            "transaction.timeout.ms": int(_TIMEOUT_S * 1000),
            "debug": f"{debug},{CONTEXT}" if debug else CONTEXT,
            "logger": self._added,
        }
        if apart:
            self._settings["batch.size"] = 1
        self._apart = apart
        self._done = done
        self._name = transactional_id
        self._producer: Producer | None = None
        # Have the other ids since `open`; nothing was sent with them. One takes over where an id is lost for long.
        self._spare: list[Producer] = []
        self._visibility = Visibility(done.admin, (done.topic, done.partition))
        # Topics that were there when they were first published to.
        self._found: set[str] = set()
        # Of the transaction under way: written by delivery callbacks, which the thread that publishes serves.
        self._blame = _Blame()
        #: The last offset that was written, by place. Empty unless somebody waits to see it.
        self._written: dict[Place, int] = {}
        self._notes_places = False
        self._done_offset: int | None = None
        #: All of the done log below this offset was read by `open`, or written by this one and ended.
        self.known_to = 0
        #: Monotonic seconds at which the call under way last went on. Read by others.
        self.active_at = time.monotonic()
        #: Kafka transactions committed.
        self.groups = 0
        #: Times it was opened.
        self.opened = 0

    @property
    def is_open(self) -> bool:
        """Whether there is a producer to publish with."""
        return self._producer is not None

    def open(self, shut_out: Sequence[str] = ()) -> frozenset[str]:
        """Shut every other publisher of the shard out, and return the ids that were published and not forgotten yet.

        Args:
            shut_out: other transactional ids whose owners are shut out, too, before the done log is read.

        Raises:
            ConfigurationError: the client library refused the settings.
            InDoubtError: the broker did not answer in time; nothing is open, try again.
        """
        self.close()
        for other in shut_out:
            _discard(*self._initialised(other))
        # What the predecessor left open is ended, and its markers are written, when this returns.
        producer, *spare = self._initialised(self._name)
        try:
            self._goes_on()
            self.known_to, found = self._done.read(self._goes_on)
        except (KafkaException, TimeoutError) as error:
            _discard(producer, *spare)
            cause = reason(error) if isinstance(error, KafkaException) else error
            if isinstance(error, KafkaException) and is_missing_right(error):
                right = topic_right(Operation.READ, self._done.topic)
                cause = self._rights.refused("it cannot be read what was published", right)
            raise InDoubtError(f"{self._name} cannot open: {cause}; trying again helps") from error
        except BaseException:
            _discard(producer, *spare)
            raise
        self._producer, self._spare = producer, spare
        self.opened += 1
        return found

    def _initialised(self, name: str) -> list[Producer]:
        """Shut out whoever has one of the transactional ids that stand for a name; return producers that have them.

        An id cannot be had while a target takes not even the markers that end its last transaction: nobody can. So
        there are several, and whoever opens takes all that can be had, and uses the first.

        Raises:
            ConfigurationError: the client library refused the settings.
            InDoubtError: the broker did not answer in time, or none can be had.
        """
        made: list[Producer] = []
        try:
            for number in range(1, _IDS + 1):
                producer = self._with_id(name if number == 1 else f"{name}.{number}")
                if producer is not None:
                    made.append(producer)
        except BaseException:
            _discard(*made)
            raise
        if not made:
            raise InDoubtError(f"{name} cannot open: the last transactions of all its ids wait for their markers")
        return made

    def _with_id(self, transactional_id: str) -> Producer | None:
        self._goes_on()
        self._added.begin()
        producer = clients.producer(self._bootstrap_servers, {**self._settings, "transactional.id": transactional_id})
        try:
            producer.init_transactions(_ID_TIMEOUT_S)
        except KafkaException as error:
            first = error
        else:
            return producer
        try:
            # Serves the log.
            producer.poll(0)
            if not self._added.is_concurrent:
                self._goes_on()
                producer.init_transactions(_OPEN_TIMEOUT_S)
                return producer
        except KafkaException as error:
            first = error
            producer.poll(0)
        _discard(producer)
        if self._added.is_concurrent:
            _log.warning("%s waits for markers of its last transaction, which a target does not take", transactional_id)
            return None
        why = reason(first)
        if is_missing_right(first):
            why = self._rights.refused("what is decided cannot be published", self._right_to_ids)
        raise InDoubtError(f"{transactional_id} cannot open: {why}; trying again helps") from first

    @property
    def _right_to_ids(self) -> Right:
        # What the ids of all shards of the store begin with.
        return transactional_right(self._done.topic.removesuffix(".done"))

    def close(self) -> None:
        """Discard the producers with all they hold."""
        producer, self._producer = self._producer, None
        spare, self._spare = self._spare, []
        self._found.clear()
        if producer is not None:
            _discard(producer, *spare)

    def publish(self, entries: Iterable[Publishable], *, until_visible: bool = False) -> Outcome:
        """Publish transactions in their order, in as few Kafka transactions as it takes.

        What is refused is set apart, and what must not pass it waits behind it; the others are published. Where only
        some messages of a topic are refused, all of that topic is set apart, for nobody knows which they were; save in
        the one for what is tried apart.

        Args:
            entries: what to publish.
            until_visible: return when readers of committed records can see it.

        Raises:
            InDoubtError: nothing is known of some of them, and it is closed; `open` tells what was published.
        """
        outcome = Outcome()
        self._notes_places = until_visible
        try:
            left = self._without_missing(list(entries), outcome)
            while left:
                try:
                    blame = self._transaction(left)
                except _IdLostError:
                    left = _divide(left, {}, self._with_another_id(left, {}), outcome)
                    continue
                if blame is None:
                    outcome.published.extend(entry.transaction_id for entry in left)
                    break
                before = len(left)
                left = self._set_apart(left, blame, outcome)
                if len(left) == before or blame.silent:
                    # What was sent and not acknowledged may stand in the log, aborted. The same batches sent again by
                    # the same producer could be taken for repetitions of those, and be acknowledged for them.
                    why = f"{self._name}: a Kafka transaction was aborted: {blame.cause}"
                    raise InDoubtError(why, outcome.faults)  # noqa: TRY301 - closed as for the others
        except InDoubtError:
            self.close()
            raise
        return outcome

    def forget(self, offset: int | None = None) -> None:
        """Let the done log go below an offset, or as far as it is known: all there is marked durably in the store."""
        self._done.forget(self.known_to if offset is None else offset)

    def _goes_on(self) -> None:
        self.active_at = time.monotonic()

    def _without_missing(self, entries: list[Publishable], outcome: Outcome) -> list[Publishable]:
        """Set apart what is for topics that are not there, before it costs a transaction."""
        producer = self._producer
        if producer is None:
            raise InDoubtError(f"{self._name} is not open")
        topics = {message.topic for entry in entries for message in entry.messages}
        new = topics if self._apart else topics - self._found
        if not new:
            return entries
        faults = self._missing(producer, new)
        self._found |= new - faults.keys()
        if self._apart:
            faults.update(self._take_no_markers(new - faults.keys()))
        return _divide(entries, {}, faults, outcome) if faults else entries

    def _missing(self, producer: Producer, topics: set[str]) -> dict[str, Fault]:
        """Return those topics that are not there, or are not to be seen; none where brokers are away."""
        self._goes_on()
        try:
            if len(topics) > _ONE_BY_ONE:
                known = dict(producer.list_topics(timeout=_ASK_S).topics)
            else:
                known = {one: producer.list_topics(one, timeout=_ASK_S).topics[one] for one in topics}
        except (KafkaException, KeyError):
            # The transaction tells.
            return {}
        absent, hidden = KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART), KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED)
        errors = {name: known[name].error if name in known else absent for name in topics}
        # The list of all has only what may be seen.
        errors.update(dict.fromkeys(hidden_topics(self._done.admin, topics - known.keys(), _ASK_S), hidden))
        return {
            name: Fault(f"{name}: {self._reason(name, error)}", whole=True)
            for name, error in errors.items()
            if error is not None and blamed(error) is Blamed.TOPIC
        }

    def _set_apart(self, entries: list[Publishable], blame: _Blame, outcome: Outcome) -> list[Publishable]:
        faults = self._faults(blame)
        refused: Mapping[str, str] = {}
        if self._apart:
            refused = {name: why for name, (_, why) in blame.messages.items()}
        self._found.difference_update(faults)
        if self._take_no_markers([topic for topic, _ in blame.messages.values()]):
            faults = self._with_another_id(entries, faults)
        return _divide(entries, refused, faults, outcome)

    def _with_another_id(self, entries: list[Publishable], faults: Mapping[str, Fault]) -> dict[str, Fault]:
        """Go on with another transactional id: nothing can be done with this one until a topic takes its markers.

        Nothing is in doubt: the transaction that waits for them was aborted, or its commit was acknowledged. And
        whoever shuts this publisher out takes all ids. (A healthy one may wait, too, and for ever: Kafka forgets to
        complete those whose markers were sent together with one that a topic did not take.)

        Returns:
            The faults, and those of all topics of the entries that take no markers.

        Raises:
            InDoubtError: there is no other id.
        """
        topics = {message.topic for entry in entries for message in entry.messages}
        found = {**faults, **self._take_no_markers(topics | self._found)}
        why = f"{self._name}: its last transaction does not end: its markers are not taken"
        if self._producer is None or not self._spare:
            raise InDoubtError(why, found)
        _log.warning("%s; it goes on with another transactional id", why)
        _discard(self._producer)
        self._producer = self._spare.pop(0)
        return found

    def _take_no_markers(self, topics: Iterable[str]) -> dict[str, Fault]:
        """Return those topics whose longest message is so short that transactions there never end."""
        resources = [ConfigResource(ResourceType.TOPIC, topic) for topic in dict.fromkeys(topics)]
        found: dict[str, Fault] = {}
        if not resources:
            return found
        self._goes_on()
        for resource, answer in self._done.admin.describe_configs(resources, request_timeout=_ASK_S).items():
            try:
                limit = int(answer.result(_ASK_S)["max.message.bytes"].value)
            except (KafkaException, KeyError, ValueError, TimeoutError):
                # Not allowed to ask, or away: what is done there tells.
                continue
            if limit < _MARKER_BYTES:
                why = f"{resource.name}: its max.message.bytes is {limit}, too little for the markers of transactions"
                found[resource.name] = Fault(why, whole=True)
        return found

    def _faults(self, blame: _Blame) -> dict[str, Fault]:
        """Return which topics are to blame for an abort. Brokers that do not answer are nobody's fault."""
        faults = {
            topic: Fault(f"{topic}: {self._lacks(topic) if is_forbidden(why) else why}", whole=True)
            for topic, why in self._added.refused.items()
            if topic != self._done.topic
        }
        faults.update({topic: Fault(why, whole=True) for topic, why in blame.topics.items()})
        if blame.silent and self._brokers_answer():
            faults.update({topic: Fault(why, whole=True) for topic, why in blame.silent.items()})
        if not self._apart:
            for topic, why in blame.messages.values():
                faults.setdefault(topic, Fault(why, whole=False))
        return faults

    def _brokers_answer(self) -> bool:
        producer = self._producer
        if producer is None:
            return False
        self._goes_on()
        try:
            producer.list_topics(self._done.topic, timeout=_ASK_S)
        except KafkaException:
            return False
        # What went into the done log went out together with the rest, and that log is well.
        return self._apart or self._done_offset is not None

    def _transaction(self, group: list[Publishable]) -> _Blame | None:
        """Run one Kafka transaction; return None when it is committed, or why it was aborted."""
        producer = self._producer
        if producer is None:
            raise InDoubtError(f"{self._name} is not open")
        self._blame, self._done_offset, self._written = _Blame(), None, {}
        ids = [entry.transaction_id for entry in group]
        try:
            producer.poll(0)
            self._watch.begin()
            self._added.begin()
            self._goes_on()
            producer.begin_transaction()
            for entry in group:
                self._produce(producer, entry)
            topics = {message.topic for entry in group for message in entry.messages}
            if self._apart:
                self._await_delivery(producer, topics)
            if not self._blame.cause:
                self._produce_done(producer, ids)
                self._await_delivery(producer, topics)
            if not self._blame.cause:
                self._goes_on()
                self._commit(producer)
                self._await_visible()
                return None
        except KafkaException as error:
            self._blame.cause = self._blame.cause or reason(error)
        self._abort(producer)
        if is_forbidden(self._added.refused.get(self._done.topic, "")):
            right = topic_right(Operation.WRITE, self._done.topic)
            self._blame.cause = self._rights.refused("what is decided cannot be published", right)
        return self._blame

    def _await_delivery(self, producer: Producer, topics: set[str]) -> None:
        """Wait until all is delivered or something failed: what comes behind a failed message would time out.

        Raises:
            _IdLostError: the transaction before does not end.
        """
        begun = time.monotonic()
        look_s = _LOOK_S
        while len(producer) and not self._blame.cause:
            self._goes_on()
            producer.poll(_POLL_S)
            waited_s = time.monotonic() - begun
            if waited_s > _MARKERS_S and self._added.is_concurrent:
                raise _IdLostError
            if waited_s > look_s and not self._blame.cause:
                look_s += _LOOK_S
                for topic, fault in self._missing(producer, topics).items():
                    self._blame.topics[topic] = self._blame.cause = fault.why
            if waited_s > _SEND_TIMEOUT_S + 1:
                self._blame.cause = f"{len(producer)} messages were not delivered within {_SEND_TIMEOUT_S:g} s"

    def _await_visible(self) -> None:
        if self._notes_places and self._done_offset is not None:
            self._goes_on()
            self._visibility.wait(self._written)

    def _produce(self, producer: Producer, entry: Publishable) -> None:
        for message in entry.messages:
            reported = partial(self._reported, entry.transaction_id)
            try:
                self._send(producer, message, reported)
            except KafkaException as error:
                self._failed(entry.transaction_id, message.topic, error.args[0])
                raise

    def _produce_done(self, producer: Producer, ids: list[str]) -> None:
        for start in range(0, len(ids), _IDS_PER_RECORD):
            value = encode_ids(ids[start : start + _IDS_PER_RECORD])
            record = OutboundMessage(self._done.topic, self._done.partition, None, value, ())
            self._send(producer, record, self._done_reported)

    def _send(
        self, producer: Producer, message: OutboundMessage, reported: Callable[[KafkaError | None, Message], None]
    ) -> None:
        """Hand a message to the client library; wait for room in its buffer."""
        partition = -1 if message.partition is None else message.partition
        headers = cast("Any", list(message.headers))
        deadline = time.monotonic() + _TIMEOUT_S
        while True:
            try:
                producer.produce(message.topic, message.value, message.key, partition, reported, headers=headers)
            except BufferError:
                if time.monotonic() > deadline:
                    raise KafkaException(KafkaError(KafkaError._QUEUE_FULL)) from None  # noqa: SLF001 - the library's public constants look so
                self._goes_on()
                producer.poll(_POLL_S)
            else:
                return

    def _reported(self, transaction_id: str, error: KafkaError | None, message: Message) -> None:
        if error is not None:
            self._failed(transaction_id, str(message.topic()), error)
        elif self._notes_places:
            self._note(message)

    def _note(self, message: Message) -> None:
        place = str(message.topic()), int(message.partition() or 0)
        self._written[place] = max(int(message.offset() or 0), self._written.get(place, 0))

    def _done_reported(self, error: KafkaError | None, message: Message) -> None:
        if error is None:
            self._done_offset = message.offset()
            if self._notes_places:
                self._note(message)
        else:
            self._blame.cause = self._blame.cause or f"{self._done.topic}: {reason(error)}"

    def _failed(self, transaction_id: str, topic: str, error: KafkaError) -> None:
        text = f"{topic}: {self._reason(topic, error)}"
        kind = blamed(error)
        if kind is Blamed.MESSAGE:
            self._blame.messages[transaction_id] = topic, text
        elif kind is Blamed.TOPIC:
            self._blame.topics[topic] = text
        elif kind is Blamed.SILENCE:
            self._blame.silent[topic] = text
        if kind is not Blamed.NOBODY or not self._blame.cause:
            self._blame.cause = text

    def _reason(self, topic: str, error: KafkaError) -> str:
        return self._lacks(topic) if is_missing_right(error) else reason(error)

    def _lacks(self, topic: str) -> str:
        return self._rights.lacks(topic_right(Operation.WRITE, topic))

    def _commit(self, producer: Producer) -> None:
        try:
            self._watch.commit(producer, _END_TIMEOUT_S)
        except UnknownEndError as error:
            raise InDoubtError(f"{self._name}: {error}") from error
        self.groups += 1
        self._rights.granted(topic_right(Operation.WRITE, self._done.topic), self._right_to_ids)
        if self._done_offset is not None:
            self.known_to = self._done_offset + 1

    def _abort(self, producer: Producer) -> None:
        # What was refused takes the library a moment to clear away; an abort in that moment waits for time-outs.
        until = time.monotonic() + _CLEARING_S
        while (left := until - time.monotonic()) > 0:
            producer.poll(left)
        self._goes_on()
        try:
            self._watch.abort(producer, _END_TIMEOUT_S)
        except UnknownEndError as error:
            faults = self._faults(self._blame)
            raise InDoubtError(f"{self._name}: {error}, after: {self._blame.cause}", faults) from error


def _divide(
    entries: Iterable[Publishable], refused: Mapping[str, str], faults: Mapping[str, Fault], outcome: Outcome
) -> list[Publishable]:
    """Set apart what is to blame and what must not pass it; return the others."""
    left: list[Publishable] = []
    stopped: set[int] = set()
    outcome.faults.update(faults)
    for entry in entries:
        why = refused.get(entry.transaction_id)
        why = why or next((faults[m.topic].why for m in entry.messages if m.topic in faults), None)
        if why is None and (not stopped or stopped.isdisjoint(lanes_of(entry))):
            left.append(entry)
            continue
        stopped.update(lanes_of(entry))
        if why is None:
            outcome.held.append(entry.transaction_id)
        else:
            outcome.refused[entry.transaction_id] = why
    return left


def _discard(*producers: Producer) -> None:
    """Drop what producers hold; their destructors close them, when the caller lets go of them.

    `close()` would try to abort first, and warn where it was fenced or has failed, which is what it is closed for. What
    it left open its successor ends.
    """
    for producer in producers:
        try:
            producer.purge()
        except KafkaException as error:
            _log.info("what a Kafka producer held could not be dropped: %s", reason(error))


__all__ = ["InDoubtError", "Outbound", "OutboundMessage", "Outcome", "Publishable", "lanes_of"]
