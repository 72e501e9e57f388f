"""Refusals: rights that brokers deny a member of a group, and client errors that arrive among the messages.

`topics.py` checks the rights before the start. While the consumer runs, this module logs each missing right with the
command that grants it. The client goes on by itself once the right is granted. Refused writes are shown with the
messages that wait for them, by `DeadLetterPublisher` and `HandlerResults`.
"""

from __future__ import annotations

import logging
from math import inf

from confluent_kafka import KafkaError

from penstock.clients.kafka_errors import is_missing_right, reason
from penstock.clients.ration import once_in, rationed
from penstock.clients.rights import Operation, group_right, missing_right_text, topic_right
from penstock.consumer.engine import Engine
from penstock.errors import PenstockError

_log = rationed(__name__)

#: Seconds between two log lines about one refusal; also how long a refusal by the group counts if it may have passed.
_LOG_INTERVAL_S = 60.0

#: Errors from which the client recovers by itself. They are logged at debug level.
_TRANSIENT = frozenset({KafkaError._PARTITION_EOF, KafkaError._ALL_BROKERS_DOWN, KafkaError._TRANSPORT})  # noqa: SLF001 - the client library's names of its local errors
#: The broker's text if group.protocol=consumer is switched off.
_NO_VERSION = KafkaError(KafkaError.UNSUPPORTED_VERSION).str()
#: The first words of the error that ended a client, by its cause.
_ENDED_BY = {
    code: f"Fatal error: {KafkaError(code).str()}"
    for code in (KafkaError.GROUP_AUTHORIZATION_FAILED, KafkaError.TOPIC_AUTHORIZATION_FAILED)
}


class Refusals:
    """Logs refusals and remembers that of the group. On the poll thread only, except `of_group`."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        # The refusal by the group, and until when it counts. Replaced as a whole.
        self._of_group: tuple[str, float] | None = None

    def of_group(self) -> str | None:
        """Return why the group refuses this member or its commits, or None. Any thread."""
        found = self._of_group
        return found[0] if found is not None and self._engine.clock.monotonic() < found[1] else None

    def taken(self) -> None:
        """Note that the group has accepted this member or a commit."""
        self._of_group = None

    def note_missing_right(self, error: KafkaError, topic: str | None) -> None:
        """Log the missing right of a refusal. It may be a right on the group, even if a topic is given."""
        engine = self._engine
        if error.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED and topic:
            text = self.of_topic(topic)
        else:
            what = f"group {engine.group} can neither be joined nor commit"
            text = missing_right_text(what, [group_right(engine.group)], engine.principal)
            self._of_group = text, inf
        extra = once_in(_LOG_INTERVAL_S, text, engine.clock.monotonic())
        _log.error("%s; it goes on by itself once the permission is granted", text, extra=extra)

    def of_topic(self, topic: str) -> str:
        """Return the missing right to read a topic, and the command that grants it."""
        what = f"topic {topic} cannot be read, so its messages are no longer handled"
        return missing_right_text(what, [topic_right(Operation.READ, topic)], self._engine.principal)

    def take(self, error: KafkaError, topic: str | None) -> bool:
        """Handle an error of the client; return whether the client has ended and needs a successor.

        Raises `PenstockError` if the consumer ends.
        """
        # The error of a fenced static member comes in a message, and is not marked fatal.
        is_fatal = error.fatal() or error.code() == KafkaError._FATAL  # noqa: SLF001 - as above
        if is_fatal:
            error = self._require_successor(error)
        if error.code() == KafkaError.INCONSISTENT_GROUP_PROTOCOL:
            now = self._engine.clock.monotonic()
            why = (
                f"the group does not take this member: {reason(error)}; the group has members that do not rebalance "
                "cooperatively, such as with partition.assignment.strategy=range, and penstock does: stop them first, "
                "or give them cooperative-sticky, Java's in two rolling restarts (docs/coming-from.md); it is tried "
                "again"
            )
            # The client tries again every other second.
            self._of_group = why, now + _LOG_INTERVAL_S
            _log.warning("%s", why, extra=once_in(_LOG_INTERVAL_S, why, now))
        elif is_missing_right(error):
            self.note_missing_right(error, topic)
        else:
            level = logging.DEBUG if error.code() in _TRANSIENT else logging.WARNING
            _log.log(level, "fetching: %s", reason(error))
        return is_fatal

    @staticmethod
    def _require_successor(error: KafkaError) -> KafkaError:
        """Return the missing right that ended a client; raise `PenstockError` if no new client can help."""
        for code, text in _ENDED_BY.items():
            # With the protocol "consumer", a client ends at a refused heartbeat (librdkafka 2.16). Only its text has
            # the code of the cause.
            if error.code() == code or error.str().startswith(text):
                return KafkaError(code)
        remedy = "start the consumer again"
        if "group.instance.id" in error.str():
            remedy = "give each member a group.instance.id of its own, or the two end each other in turn"
        elif _NO_VERSION in error.str():
            remedy = "leave group.protocol=consumer out, or have the brokers allow it (their feature group.version)"
        raise PenstockError(f"the Kafka client cannot go on: {reason(error)}; {remedy}")
