"""`PartitionReader` reads partitions without joining a group: from start to end, one record, or continuously.

It commits nothing. Transaction markers and compaction leave offsets without a record. So positions come from records
and from the client's end-of-partition events, never from counting.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from math import inf
from typing import Any, Self

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from penstock.clients.bounded_calls import CLOSE_S, end_within
from penstock.clients.factory import consumer as new_consumer
from penstock.clients.gc_pause import collection_put_off
from penstock.clients.kafka_errors import ErrorKind, code_of, kind_of, reason
from penstock.errors import BrokerConnectionError, PenstockError
from penstock.options import ClientConfig
from penstock.places import place_text

#: Prefixes of settings that matter only to a member of a consumer group, or to the user's own clients.
_OF_A_MEMBER = (
    "auto.",
    "enable.auto.",
    "group.",
    "heartbeat.",
    "max.poll.",
    "on_commit",
    "partition.assignment.",
    "session.",
    "stats_cb",
)


def reading_settings(
    config: ClientConfig, group: str, isolation: str = "read_committed", given: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the settings of such a consumer.

    Args:
        config: the user's settings; those of group members, and the callback of statistics, are left out.
        group: a name that the client library requires; it joins no group.
        isolation: `read_committed` or `read_uncommitted`.
        given: settings that override the user's and ours.
    """
    return {
        **without_membership(config),
        "group.id": group,
        "isolation.level": isolation,
        "enable.auto.commit": False,
        "enable.auto.offset.store": False,
        "enable.partition.eof": True,
        "auto.offset.reset": "earliest",
        # An empty answer marks the end of a partition: the broker must not hold it back for half a second.
        "fetch.wait.max.ms": 20,
        "fetch.queue.backoff.ms": 5,
        **(given or {}),
    }


def without_membership(config: ClientConfig) -> dict[str, Any]:
    """Return client settings without those of a member of a consumer group, and the callback of statistics."""
    return {key: value for key, value in config.items() if not key.startswith(_OF_A_MEMBER)}


#: Topic and partition.
Place = tuple[str, int]
#: Called with each error except the end of a partition, and its place. If it does not raise, reading goes on.
Failed = Callable[[ErrorKind, KafkaError, Place], object]

_POLL_S = 0.1
_RECORDS = 1_000
#: The group name of a client that reads one record; the library requires a name.
_ONE_RECORD = "penstock-one-record"
#: Seconds of pause after an error. Errors return at once, so without a pause the reader would spin.
_RETRY_DELAY_S = 0.1
#: Least time-out of a question, in seconds.
_MIN_TIMEOUT_S = 0.001


def raise_lasting(kind: ErrorKind, error: KafkaError, _place: Place) -> None:
    """Raise permanent errors. From others the client recovers by itself, or the reader's time limit ends it."""
    if kind in {ErrorKind.MISSING_RIGHT, ErrorKind.FATAL}:
        raise KafkaException(error)


class NotReadInTimeError(TimeoutError):
    """Reading took too long. The text names the positions reached."""


class PartitionReader:
    """Reads with a consumer of its own. For one thread; a context manager.

    Args:
        bootstrap_servers: addresses of the brokers.
        config: client settings by librdkafka's names; those of group members are left out.
        group: the group for requests by `consumer`. The reader works without permission on it.
        failed: called with each error except the end of a partition; default: raise permanent errors.
        isolation: `read_committed` or `read_uncommitted`.
        given: settings that override the user's and those of every reader.

    Raises:
        ConfigurationError: the client library refused a setting.
    """

    def __init__(
        self,
        bootstrap_servers: str,
        config: ClientConfig,
        group: str,
        failed: Failed = raise_lasting,
        *,
        isolation: str = "read_committed",
        given: Mapping[str, Any] | None = None,
    ) -> None:
        #: The client, for requests other than reading.
        self.consumer = new_consumer(bootstrap_servers, reading_settings(config, group, isolation, given))
        self._group = group
        self._failed = failed
        #: The next offset of each partition that is read.
        self.positions: dict[Place, int] = {}
        #: The offsets at which reading ends, for partitions that have such an end.
        self.ends: dict[Place, int] = {}
        #: Partitions without more records now: at their end, or without the next offset.
        self.exhausted: set[Place] = set()
        # Paused partitions. For the client library they stay paused when they are assigned again.
        self._paused: set[Place] = set()
        #: Why nothing arrives now, or None.
        self.trouble: str | None = None
        #: When the last record or end arrived, in monotonic seconds.
        self.heard_at = time.monotonic()
        # An error to raise after the records before it were returned.
        self._held: Exception | None = None
        self._is_closed = False

    def bounds(self, topic: str, numbers: Iterable[int], limit_s: float) -> dict[int, tuple[int, int]]:
        """Return where partitions begin and end. A `read_committed` end is at the oldest open transaction.

        Raises `KafkaException` if brokers do not answer all questions within `limit_s` seconds.
        """
        deadline, found = time.monotonic() + limit_s, {}
        for number in numbers:
            place = TopicPartition(topic, number)
            answer = self.consumer.get_watermark_offsets(place, max(_MIN_TIMEOUT_S, deadline - time.monotonic()))
            if answer is None:  # the client gave up
                raise KafkaException(KafkaError(KafkaError._TIMED_OUT, "no answer in time"))  # noqa: SLF001 - the library's public constants look so
            found[number] = answer
        return found

    def start(self, starts: Mapping[Place, int], ends: Mapping[Place, int] | None = None) -> None:
        """Read these partitions from now on, and no others. `behind` names those that have not reached their ends."""
        self.positions, self.ends = dict(starts), dict(ends or {})
        self.exhausted, self._held = set(), None
        self.heard_at = time.monotonic()
        self.consumer.assign([TopicPartition(*place, offset) for place, offset in starts.items()])
        if again := self._paused & starts.keys():
            self.consumer.resume([TopicPartition(*place) for place in again])
            self._paused -= again

    def pause(self, places: Collection[Place]) -> None:
        """Stop reading these partitions: their further records would delay those of the others."""
        if places:
            self.consumer.pause([TopicPartition(*place) for place in places])
            self._paused |= set(places)

    @property
    def behind(self) -> set[Place]:
        """The partitions that have not reached their ends."""
        return {place for place, end in self.ends.items() if self.positions[place] < end}

    def poll(self, timeout_s: float, most: int = _RECORDS) -> list[Message]:
        """Return available records, after waiting at most `timeout_s` seconds for the first.

        Raises what `failed` raises, after the records before the error were returned.
        """
        if self._held is not None:
            held, self._held = self._held, None
            raise held
        records: list[Message] = []
        hindered = False
        for message in take(self.consumer, timeout_s, most):
            place, error = (message.topic() or "", message.partition() or 0), message.error()
            if error is None:
                if place in self.positions:  # late records of an earlier assignment are dropped
                    self.positions[place] = (message.offset() or 0) + 1
                    self.note_answer()
                    self.exhausted.discard(place)
                    records.append(message)
                continue
            try:
                hindered |= self._take_error(error, place, message.offset())
            except Exception as raised:
                if not records:
                    raise
                self._held = raised
                break
        if hindered and not records:
            time.sleep(min(_RETRY_DELAY_S, timeout_s))
        return records

    def read(
        self,
        starts: Mapping[Place, int],
        ends: Mapping[Place, int],
        *,
        limit_s: float = inf,
        silence_s: float = inf,
        step: Callable[[set[Place], float], object] = lambda _behind, _idle_s: None,
        most: int = _RECORDS,
    ) -> Iterator[list[Message]]:
        """Yield the records of partitions, each from its start to before its end, in lists that are not empty.

        `step` is called between fetches with the partitions that are behind and the seconds without any record. It may
        raise. Raises `NotReadInTimeError` if all takes longer than `limit_s` seconds, or nothing arrives for
        `silence_s` seconds, and the errors of `poll`.
        """
        behind = {place for place, start in starts.items() if start < ends[place]}
        if not behind:
            return
        self.start({place: starts[place] for place in behind}, {place: ends[place] for place in behind})
        deadline = time.monotonic() + limit_s
        try:
            while behind:
                now = time.monotonic()
                if now > deadline or now - self.heard_at > silence_s:
                    raise self.late(limit_s if now > deadline else silence_s)
                step(behind, now - self.heard_at)
                records = [
                    message
                    for message in self.poll(_POLL_S, most)
                    if (message.offset() or 0) < ends[message.topic() or "", message.partition() or 0]
                ]
                if (still := self.behind) and still != behind:
                    self.pause(behind - still)
                behind = still
                if records:
                    yield records
                    self.heard_at = time.monotonic()  # the caller's work with them does not count as silence
        finally:
            if not self._is_closed:
                self.consumer.unassign()

    def record_at(self, place: Place, offset: int, limit_s: float) -> Message | None:
        """Return the record at an offset, or None if there is none; errors as `read`."""
        self.start({place: offset}, {place: offset + 1})
        deadline = time.monotonic() + limit_s
        while time.monotonic() < deadline:
            for record in self.poll(_POLL_S, 1):
                return record if record.offset() == offset else None
            if self.exhausted:
                return None
        raise self.late(limit_s)

    def note_answer(self) -> None:
        """Note that brokers answer. Callers that send other requests may note it, too."""
        self.heard_at, self.trouble = time.monotonic(), None

    def close(self, limit_s: float | None = None) -> None:
        """Close the connections within `limit_s` seconds, or `CLOSE_S`. A client that hangs is abandoned."""
        self._is_closed = True
        end_within(CLOSE_S if limit_s is None else limit_s, f"closing the reader of {self._group}", self.consumer.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_raised: object) -> None:
        self.close()

    def _take_error(self, error: KafkaError, place: Place, offset: int | None) -> bool:
        """Handle an end or an error; tell whether it is an obstacle."""
        kind = kind_of(error)
        if kind in {ErrorKind.END, ErrorKind.OUT_OF_RANGE} and place in self.positions:
            self.exhausted.add(place)
        if kind is ErrorKind.END:
            if place in self.positions:
                self.positions[place] = offset or 0
                self.note_answer()
            return False
        if kind is not ErrorKind.GROUP:
            self.trouble = reason(error)
        self._failed(kind, error, place)
        return kind is not ErrorKind.GROUP

    def late(self, seconds: float) -> NotReadInTimeError:
        """Return the error for a reader that took longer than these seconds."""
        places = sorted(self.behind)
        read = ", ".join(f"{place[0]}:{place[1]} to {self.positions[place]} of {self.ends[place]}" for place in places)
        why = "" if self.trouble is None else f" ({self.trouble})"
        return NotReadInTimeError(f"reading came only so far within {seconds:.3g} s: {read}{why}")


def take(consumer: Consumer, timeout_s: float, most: int) -> list[Message]:
    """Return available records after waiting for the first. Asked for many, the library would wait for all of them."""
    first = consumer.poll(timeout_s)
    if first is None:
        return []
    with collection_put_off():
        return [first, *(consumer.consume(most - 1, 0) if most > 1 else ())]


def read_record(bootstrap_servers: str, config: ClientConfig, place: Place, offset: int, limit_s: float) -> Message:
    """Return the record at an offset, at the user's `isolation.level`; arguments as `PartitionReader`.

    Raises:
        PenstockError: there is none.
        BrokerConnectionError: it did not arrive within `limit_s` seconds.
    """
    text = place_text(*place, offset)
    isolation = config.get("isolation.level", "read_committed")
    with PartitionReader(bootstrap_servers, config, _ONE_RECORD, isolation=isolation) as reader:
        deadline = time.monotonic() + limit_s
        try:
            # A client that reads an absent or hidden topic reports nothing in this time.
            reader.bounds(place[0], [place[1]], limit_s)
            record = reader.record_at(place, offset, deadline - time.monotonic())
        except KafkaException as error:
            is_hidden = code_of(error) == KafkaError._UNKNOWN_PARTITION  # noqa: SLF001 - the library's public constants look so
            why = "there is no such partition, or this user may not see it" if is_hidden else reason(error)
            raise BrokerConnectionError(f"{text} did not come: {reader.trouble or why}") from error
        except NotReadInTimeError as error:
            raise BrokerConnectionError(f"{text} did not come: {reader.trouble or 'no answer'}") from error
    if record is None:
        raise PenstockError(f"there is no message at {text}: it was deleted, or is not committed")
    return record
