"""Fetch errors: which of them end the consumer, which the client recovers from by itself, and how they are logged.

The client hands them over among the messages, those of the group included.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

from confluent_kafka import KafkaError

from penstock.clients.cluster import Clock
from penstock.clients.kafka_errors import ErrorKind, is_missing_right, kind_of, reason
from penstock.consumer.polling.health.lost_positions import LostPositions
from penstock.consumer.polling.health.rights_watch import RightsWatch
from penstock.consumer.polling.health.topic_watch import TopicWatch
from penstock.errors import PenstockError

_log = logging.getLogger(__name__)

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
    rights_watch: RightsWatch
    lost_positions: LostPositions
    clock: Clock
    # When and why the brokers refused this member. Replaced as a whole, so that any thread may read it.
    _refusal: tuple[float, str] | None = field(default=None, init=False)
    _refusal_logged_at: float = field(default=-_LOG_AGAIN_S, init=False)

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
                    self._missing_right(KafkaError(code), topic)
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
            self._missing_right(error, topic)
        else:
            level = logging.DEBUG if error.code() in _TRANSIENT else logging.WARNING
            _log.log(level, "fetching: %s", reason(error))
        return False

    def _missing_right(self, error: KafkaError, topic: str | None) -> None:
        now = self.clock.monotonic()
        self._refusal = (now, self.rights_watch.refused(error, topic, now))

    def _refused(self, why: str) -> None:
        """Log why the group does not take this member; the client tries again every other second."""
        now = self.clock.monotonic()
        self._refusal = (now, why)
        if now - self._refusal_logged_at >= _LOG_AGAIN_S:
            self._refusal_logged_at = now
            _log.warning("%s", why)

    def shut_out(self) -> str | None:
        """Return why the brokers do not take this member, or None where it was not refused lately. Any thread."""
        refusal = self._refusal
        lately = refusal is not None and self.clock.monotonic() - refusal[0] < _LOG_AGAIN_S
        return refusal[1] if refusal is not None and lately else None
