"""The fetcher: it takes from the client what is there, as much as back-pressure allows, and gives it to the router.

Among the messages the client hands over errors, those of the group included. `FetchErrors` says which of them end the
consumer and which the client recovers from by itself, and logs them.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from confluent_kafka import KafkaError

from penstock.clients.cluster import Clock, ConsumerClient
from penstock.clients.gc_pause import CollectionThreshold
from penstock.clients.kafka_errors import ErrorKind, is_missing_right, kind_of, reason
from penstock.clients.ration import once_in, rationed
from penstock.consumer.assignments import Assignments
from penstock.consumer.poll.back_pressure import BackPressure
from penstock.consumer.poll.membership import Membership
from penstock.consumer.poll.positions import LostPositions
from penstock.consumer.poll.refusals import Refusals
from penstock.consumer.poll.router import Router
from penstock.consumer.poll.topics import TopicWatch
from penstock.errors import PenstockError

if TYPE_CHECKING:
    from confluent_kafka import Message as ClientMessage

_log = rationed(__name__)

#: Seconds to wait before asking again when everything is full for a moment.
SATURATED_S = 0.002
#: Messages that the client hands over in one call. It makes their objects with Python's lock held, 0.7 µs each: a whole
#: fetch in one call would keep all handlers from returning for 7 ms.
_PIECE = 500
#: Messages in a batch that are worth a step of their own.
_MUCH = 500

#: Called for each fetch, where telemetry is on: topic, messages by partition, seconds.
Polled = Callable[[str, dict[int, int], float], None]


@dataclass(slots=True, kw_only=True, eq=False, repr=False)
class Fetcher:
    """On the poll thread only."""

    membership: Membership
    clock: Clock
    assignments: Assignments
    back_pressure: BackPressure
    router: Router
    errors: FetchErrors
    polled: Polled | None
    #: Seconds within which what comes is taken together, unless much is there. Each batch wakes the poll thread and
    #: workers; where its results wait for a transaction anyway, fewer and larger ones cost a third less.
    gather_s: float = 0.0
    collection_threshold: CollectionThreshold = field(default_factory=CollectionThreshold, init=False)
    _taken_at: float = field(default=float("-inf"), init=False)
    _took_much: bool = field(default=False, init=False)

    def fetch(self, poll_timeout: Callable[[float], float]) -> None:
        """Take what is there; wait for a first message where nothing is.

        `poll_timeout` returns for how many seconds, given the time on the engine's clock.
        """
        client = self.membership.client
        begun = self.clock.monotonic()
        if not self._took_much and (left_s := self._taken_at + self.gather_s - begun) > 0:
            self.clock.sleep(left_s)
            begun += left_s
        if not self.back_pressure.apply(client, self.assignments.all(), begun):
            self.clock.sleep(SATURATED_S)
            return
        most = self.back_pressure.fetch_limit
        if not self._take([], client, most, begun):
            first = client.poll(poll_timeout(begun))
            if first is not None:
                self._take([first], client, most, begun)

    def _take(self, batch: list[ClientMessage], client: ConsumerClient, most: int, begun: float) -> bool:
        """Route a batch with what else is there; return whether there was anything."""
        while len(batch) < most:
            piece = client.consume(min(_PIECE, most - len(batch)), 0)
            batch += piece
            if len(piece) < _PIECE:
                break
        if batch:
            self._taken_at, self._took_much = self.clock.monotonic(), len(batch) >= _MUCH
            in_flight = self.back_pressure.in_flight + len(batch)
            self.collection_threshold.note_in_flight(in_flight, self._taken_at)
            self.route(batch)
        if batch and self.polled is not None:
            self._report(self.polled, self.clock.monotonic() - begun)
        return bool(batch)

    def route(self, batch: list[ClientMessage]) -> None:
        """Put messages on their lanes, and see to the errors among them: one that ends the consumer is raised."""
        errors: list[tuple[KafkaError, str | None, int | None]] = []
        # In C: a step of the interpreter for each message would be a fiftieth of its way. An error is true; compared
        # with None it raises, for `KafkaError` takes what it is compared with for a number.
        if any(map(type(batch[0]).error, batch)):
            errors = [
                (error, message.topic(), message.partition())
                for message in batch
                if (error := message.error()) is not None
            ]
            batch = [message for message in batch if message.error() is None]
        if batch:
            self.router.route(batch, self.clock.monotonic())  # type: ignore[arg-type] # fetched messages have a place
        for error, topic, partition in errors:
            if self.errors.take(error, topic, partition):
                self.membership.client_ended()

    def _report(self, polled: Polled, seconds: float) -> None:
        topics: dict[str, dict[int, int]] = {}
        for (topic, partition), count in self.router.take_counts().items():
            topics.setdefault(topic, {})[partition] = count
        for topic, counts in topics.items():
            polled(topic, counts, seconds)


#: Errors that the client recovers from by itself; they are logged at debug level.
_TRANSIENT = frozenset({KafkaError._PARTITION_EOF, KafkaError._ALL_BROKERS_DOWN, KafkaError._TRANSPORT})  # noqa: SLF001 - the client library's names of its local errors
#: Errors after which the brokers are asked at once what is the matter with the topics.
_ASK_AGAIN = frozenset({KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_PARTITION, KafkaError._ALL_BROKERS_DOWN})  # noqa: SLF001 - as above
#: Seconds between two warnings that the brokers refuse this member the same.
_LOG_AGAIN_S = 60.0

#: What a broker says where group.protocol=consumer is switched off.
_NO_VERSION = KafkaError(KafkaError.UNSUPPORTED_VERSION).str()
#: How the client begins the text of an error that ended it, by what it was.
_ENDED_BY = {
    code: f"Fatal error: {KafkaError(code).str()}"
    for code in (KafkaError.GROUP_AUTHORIZATION_FAILED, KafkaError.TOPIC_AUTHORIZATION_FAILED)
}


@dataclass(slots=True, eq=False, repr=False)
class FetchErrors:
    """Judges errors. On the poll thread, save `shut_out`."""

    topic_watch: TopicWatch
    refusals: Refusals
    lost_positions: LostPositions
    clock: Clock
    # When the group did not take this member last, and why. Replaced as a whole, so that any thread may read it.
    _refusal: tuple[float, str] | None = field(default=None, init=False)

    def take(self, error: KafkaError, topic: str | None, partition: int | None) -> bool:
        """Take an error; return whether it has ended the client, which a new one can follow.

        Raises `PenstockError` where it ends the consumer.
        """
        # For a fenced static member it comes in a message whose error is not marked fatal.
        if error.fatal() or error.code() == KafkaError._FATAL:  # noqa: SLF001 - as above
            for code, text in _ENDED_BY.items():
                # A client of the protocol "consumer" takes a refused heartbeat for its end (librdkafka 2.16). The code
                # behind it stands in the text alone.
                if error.code() == code or error.str().startswith(text):
                    self._note_missing_right(KafkaError(code), topic)
                    return True
            remedy = "start the consumer again"
            if "group.instance.id" in error.str():
                remedy = "give each member a group.instance.id of its own, or the two end each other in turn"
            elif _NO_VERSION in error.str():
                remedy = "leave group.protocol=consumer out, or have the brokers allow it (their feature group.version)"
            raise PenstockError(f"the Kafka client cannot go on: {reason(error)}; {remedy}")
        if kind_of(error) is ErrorKind.OUT_OF_RANGE:
            self.lost_positions.note(error, topic or "", partition or 0)
            return False
        if error.code() in _ASK_AGAIN:
            self.topic_watch.check_now()
        if error.code() == KafkaError.INCONSISTENT_GROUP_PROTOCOL:
            self._refused(
                f"the group does not take this member: {reason(error)}; the group has members that do not rebalance "
                "cooperatively, such as with partition.assignment.strategy=range, and penstock does: stop them first, "
                "or give them cooperative-sticky, Java's in two rolling restarts (docs/coming-from.md); it is tried "
                "again"
            )
        elif is_missing_right(error):
            self._note_missing_right(error, topic)
        else:
            level = logging.DEBUG if error.code() in _TRANSIENT else logging.WARNING
            _log.log(level, "fetching: %s", reason(error))
        return False

    def _note_missing_right(self, error: KafkaError, topic: str | None) -> None:
        self.refusals.note(error, topic, self.clock.monotonic())
        # Its answer stands in `explain` until the right is granted.
        self.topic_watch.check_now()

    def _refused(self, why: str) -> None:
        """Log why the group does not take this member; the client tries again every other second."""
        now = self.clock.monotonic()
        self._refusal = (now, why)
        _log.warning("%s", why, extra=once_in(_LOG_AGAIN_S, why, now))

    def shut_out(self) -> str | None:
        """Return why the brokers do not take this member, or None where it was not refused lately. Any thread."""
        refusal = self._refusal
        if refusal is not None and self.clock.monotonic() - refusal[0] < _LOG_AGAIN_S:
            return refusal[1]
        return self.refusals.of_group
