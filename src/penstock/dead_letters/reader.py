"""The reader of dead-letter topics for operators: dead letters, counts by error, and the progress of replays.

Reading joins no group, so it disturbs no consumer. The progress of replays is stored as the offsets of a group without
members. Like an app's commits, they have an offset map in their metadata: it has what was sent above the commit point.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Self, cast

from confluent_kafka import KafkaError, KafkaException, Message

from penstock import clients
from penstock.clients.answers import CONNECT_TIMEOUT_S
from penstock.clients.kafka_errors import ErrorKind, is_missing_right, is_transient, reason
from penstock.clients.reading import NotReadInTimeError, PartitionReader, Place
from penstock.clients.rights import (
    MissingRightError,
    Operation,
    Right,
    ask_rights,
    group_right,
    principal_of,
    topic_right,
)
from penstock.clients.topics import partition_counts, require_topics
from penstock.dead_letters.headers import DeadLetterOrigin, HeaderList, read
from penstock.errors import BrokerConnectionError, PenstockError, TopicNotFoundError
from penstock.group_offsets.group import Group, GroupState
from penstock.group_offsets.planning import Change
from penstock.group_offsets.positions import Position
from penstock.message import Record, readable_headers
from penstock.options import ClientConfig
from penstock.places import place_text

#: The group whose offsets are the progress of replays, for all dead-letter topics.
REPLAY_GROUP = "penstock-dlq-replay"
#: The codes of brokers and of the client for a deleted topic.
_DELETED = {KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC, KafkaError._UNKNOWN_PARTITION}  # noqa: SLF001 - the library's public constants look so
#: The batch size of reading. A replay that is killed repeats at most one batch.
BATCH = 500
#: The default advice of an error.
_REMEDY = "check that the topic exists, and the brokers"
#: The limit of kinds counted separately; forged headers must not fill the memory.
_MAX_KINDS = 10_000


@dataclass(frozen=True, slots=True)
class DeadLetter:
    """One message of a dead-letter topic."""

    topic: str
    partition: int
    offset: int
    key: bytes | None = field(repr=False)
    value: bytes | None = field(repr=False)
    #: All headers; only a mark if the client cannot represent their names.
    headers: HeaderList = field(repr=False)
    #: Milliseconds since the epoch; -1 without a timestamp.
    timestamp_ms: int
    #: The origin and the error by its headers.
    origin: DeadLetterOrigin

    @property
    def place(self) -> str:
        """Its topic, partition and offset, for messages."""
        return place_text(self.topic, self.partition, self.offset)

    @property
    def is_metadata_alone(self) -> bool:
        """Whether a broker wrote it for a share group without the message. Dead letters of penstock have a class."""
        is_empty = self.key is None and self.value is None
        return is_empty and self.origin.exception is None and read(self.headers) is not None


class DeadLetterLog:
    """Reads one dead-letter topic after another; a context manager. For one thread.

    All methods raise `BrokerConnectionError` if a broker does not answer, `MissingRightError` if this user lacks a
    permission, and `TopicNotFoundError` if there is no such topic.
    """

    def __init__(self, bootstrap_servers: str, config: ClientConfig | None = None) -> None:
        self.bootstrap_servers = bootstrap_servers
        self.config = config or {}
        self.principal = principal_of(self.config)
        self._reader = PartitionReader(bootstrap_servers, self.config, REPLAY_GROUP, self._not_read)
        self._group = Group(bootstrap_servers, self.config, REPLAY_GROUP)
        # The progress of replays of each topic at its first use.
        self._replayed: dict[str, GroupState] = {}

    @cached_property
    def _counts(self) -> dict[str, int]:
        return partition_counts(clients.admin(self.bootstrap_servers, self.config))

    @cached_property
    def _may_know_replays(self) -> bool:
        admin = clients.admin(self.bootstrap_servers, self.config)
        return not ask_rights(admin, [group_right(REPLAY_GROUP, Operation.DESCRIBE)]).missing

    def topics(self) -> list[str]:
        """Return the names of all topics that this user may see."""
        return sorted(self._counts)

    def partitions(self, topic: str) -> int:
        """Return the number of partitions of any topic."""
        if topic not in self._counts:
            # The question distinguishes an absent topic from a hidden one. The permission may have been granted since.
            admin = clients.admin(self.bootstrap_servers, self.config)
            try:
                found = require_topics(admin, [topic])
            except TopicNotFoundError:
                raise TopicNotFoundError(
                    f"no topic {topic} at {self.bootstrap_servers}; `penstock dlq ls --all` lists dead-letter topics"
                ) from None
            self._counts.update(found)
        return self._counts[topic]

    def bounds(self, topic: str, partition: int) -> tuple[int, int]:
        """Return the first and the end offset of a partition."""
        try:
            return self._reader.bounds(topic, [partition], CONNECT_TIMEOUT_S)[partition]
        except KafkaException as error:
            what = f"the ends of {place_text(topic, partition)} cannot be read"
            raise self.failure(error.args[0], what, topic_right(Operation.READ, topic)) from error

    def read(self, topic: str, partition: int, start: int, end: int) -> Iterator[list[DeadLetter]]:
        """Yield the dead letters from `start` to before `end`, in batches that are not empty. One call at a time."""
        place = topic, partition
        try:
            for batch in self._reader.read({place: start}, {place: end}, silence_s=CONNECT_TIMEOUT_S, most=BATCH):
                yield [_letter(message) for message in batch]
        except NotReadInTimeError as error:
            raise self._unanswered(f"{place_text(*place)} cannot be read", str(error)) from error

    def at(self, topic: str, partition: int, offset: int) -> DeadLetter:
        """Return the dead letter at an offset; `PenstockError` if there is none."""
        message = None
        # The client library would log an offset outside of the log as an error.
        if partition < self.partitions(topic) and offset in range(*self.bounds(topic, partition)):
            try:
                message = self._reader.record_at((topic, partition), offset, CONNECT_TIMEOUT_S)
            except NotReadInTimeError as error:
                raise self._unanswered(f"{place_text(topic, partition)} cannot be read", str(error)) from error
        if message is None:
            raise PenstockError(
                f"there is no message at {place_text(topic, partition, offset)}; `penstock dlq show {topic} --last 10` "
                "prints existing ones"
            )
        return _letter(message)

    def newest(self, topic: str, count: int) -> list[DeadLetter]:
        """Return the last `count` dead letters of a topic by their time, the newest last."""
        found = [letter for number in range(self.partitions(topic)) for letter in self._tail(topic, number, count)]
        return sorted(found, key=lambda letter: (letter.timestamp_ms, letter.partition, letter.offset))[-count:]

    def _tail(self, topic: str, partition: int, count: int) -> list[DeadLetter]:
        low, high = self.bounds(topic, partition)
        width = count
        while True:
            start = max(low, high - width)
            found = [letter for batch in self.read(topic, partition, start, high) for letter in batch]
            if len(found) >= count or start == low:
                return found[-count:]
            width *= 4  # some offsets have no message because of markers and compaction: read further back

    def was_replayed(self, letter: DeadLetter) -> bool | None:
        """Return whether a replay sent a dead letter; None if this user may not read the offsets of `REPLAY_GROUP`."""
        if not self._may_know_replays:
            return None
        return self.replayed(letter.topic, letter.partition).is_done(letter.offset)

    def replayed(self, topic: str, partition: int) -> Position:
        """Return the progress of replays of a partition, as it was at the first call for its topic."""
        if topic not in self._replayed:
            self._replayed[topic] = self._group.state([topic])
        return self._replayed[topic].positions[partition]

    def store_progress(self, change: Change) -> None:
        """Store the progress of a partition durably. Raises the errors of `Group.write`."""
        doubt = (
            f"the progress of {change.before.place} may not be stored in group {REPLAY_GROUP}; if so, the next replay "
            f"sends the last {BATCH} messages at most again"
        )
        self._group.write(self._replayed[change.before.topic], [change], doubt=doubt)

    def close(self) -> None:
        """Close the connections."""
        self._reader.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_raised: object) -> None:
        self.close()

    def failure(self, error: KafkaError, what: str, right: Right, remedy: str = _REMEDY) -> PenstockError:
        """Return the error of a failed act `what`, which needs the permission `right` on a topic."""
        if is_missing_right(error):
            return MissingRightError(what, [right], self.principal)
        if error.code() in _DELETED:
            return TopicNotFoundError(f"{what}: {right.name} was deleted meanwhile; {remedy}, and try again")
        if is_transient(error) or error.code() == KafkaError._MSG_TIMED_OUT:  # noqa: SLF001 - the same
            return self._unanswered(what, reason(error))
        return PenstockError(f"{what}: {reason(error)}; {remedy}, and run the same command again")

    def _unanswered(self, what: str, why: str) -> BrokerConnectionError:
        return BrokerConnectionError(
            f"{what}: no Kafka broker at {self.bootstrap_servers} answered: {why}; "
            "check the address and that the broker runs, and run the same command again"
        )

    def _not_read(self, kind: ErrorKind, error: KafkaError, place: Place) -> None:
        """Raise permanent errors of reading. Errors of `REPLAY_GROUP` are raised by its own requests instead."""
        if kind not in {ErrorKind.PASSING, ErrorKind.GROUP}:
            raise self.failure(error, f"{place_text(*place)} cannot be read", topic_right(Operation.READ, place[0]))


def _letter(message: Message) -> DeadLetter:
    headers: HeaderList = [*readable_headers(cast("Record", message))]
    kind, milliseconds = message.timestamp()
    return DeadLetter(
        message.topic() or "",
        message.partition() or 0,
        message.offset() or 0,
        message.key(),
        message.value(),
        headers,
        milliseconds if kind else -1,
        read(headers) or DeadLetterOrigin(),
    )


@dataclass(slots=True)
class Kind:
    """The counts of dead letters with one origin and one exception."""

    #: The original topic and partition; "?" if unknown.
    origin: str
    #: The class of the error by the header, which may be forged; "?" if there is none.
    exception: str
    count: int = 0
    #: The numbers of pending and of replayed ones; None if this user lacks the permission.
    pending: int | None = 0
    replayed: int | None = 0
    #: The earliest and the latest time, milliseconds since the epoch; -1 if none has a time.
    first_ms: int = -1
    last_ms: int = -1

    def add(self, timestamp_ms: int, *, was_replayed: bool | None) -> None:
        """Count a dead letter."""
        self.count += 1
        if was_replayed is None or self.replayed is None:
            self.replayed = self.pending = None
        else:
            self.replayed += was_replayed
            self.pending = self.count - self.replayed
        if timestamp_ms >= 0:
            self.first_ms = timestamp_ms if self.first_ms < 0 else min(self.first_ms, timestamp_ms)
            self.last_ms = max(self.last_ms, timestamp_ms)


def count(log: DeadLetterLog, topic: str) -> list[Kind]:
    """Read a topic to its end, and count its dead letters by origin and exception."""
    kinds: dict[tuple[str, str], Kind] = {}
    for number in range(log.partitions(topic)):
        for batch in log.read(topic, number, *log.bounds(topic, number)):
            for letter in batch:
                kind = _kind_of(letter)
                if kind not in kinds and len(kinds) >= _MAX_KINDS:
                    kind = ("(others)", "(others)")
                kinds.setdefault(kind, Kind(*kind)).add(letter.timestamp_ms, was_replayed=log.was_replayed(letter))
    return list(kinds.values())


def _kind_of(letter: DeadLetter) -> tuple[str, str]:
    origin = letter.origin
    place = origin.topic or "?"
    if origin.topic is not None and origin.partition is not None:
        place = place_text(origin.topic, origin.partition)
    return place, origin.exception or "?"
