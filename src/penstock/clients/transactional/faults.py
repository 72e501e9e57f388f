"""Who is to blame for a Kafka transaction that failed: a message, a topic, or nobody in it; and what a writer raises.

One taxonomy for all that writes in Kafka transactions. What delivery reports do not tell stands in the client library's
log: a topic that the broker does not let into a transaction fails all messages of it alike, as purged (librdkafka 2.16,
seen with a deleted topic).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from confluent_kafka import KafkaError

from penstock.clients.rights import Right
from penstock.errors import PenstockError


class IdLostError(PenstockError):
    """The broker cannot end what was left open under a transactional id; all of that is settled, take another id."""


class NotOpenedError(PenstockError):
    """The producer cannot start now: try again. `rights` are missing for it, if that is the reason."""

    def __init__(self, text: str, rights: Sequence[Right] = ()) -> None:
        super().__init__(text)
        self.rights = rights


class GivenUpError(PenstockError):
    """The owner of a writer gave its transaction up before its end had begun: it comes to nothing."""


class Blamed(Enum):
    """Whose fault an error of a message is."""

    NOBODY = "nobody"
    MESSAGE = "message"
    TOPIC = "topic"
    #: The topic's, if the broker answers otherwise.
    SILENCE = "silence"
    #: It was taken back while it was queued or on its way, for another one failed.
    PURGED = "purged"


_MESSAGES_FAULT = {
    KafkaError.MSG_SIZE_TOO_LARGE,
    KafkaError.RECORD_LIST_TOO_LARGE,
    KafkaError.INVALID_MSG,
    KafkaError.INVALID_MSG_SIZE,
    KafkaError.INVALID_RECORD,
    KafkaError.INVALID_TIMESTAMP,
    KafkaError.UNSUPPORTED_FOR_MESSAGE_FORMAT,
    KafkaError.POLICY_VIOLATION,
    KafkaError._INVALID_ARG,  # noqa: SLF001 - the client library's public constants look so, here and below
}
_SILENT = frozenset({KafkaError._MSG_TIMED_OUT, KafkaError._TIMED_OUT, KafkaError.REQUEST_TIMED_OUT})  # noqa: SLF001 - the same
_PURGED = frozenset({KafkaError._PURGE_QUEUE, KafkaError._PURGE_INFLIGHT})  # noqa: SLF001 - the same
#: What befalls messages because another one failed, the producer was fenced, or the brokers are away.
_NOBODYS_FAULT = frozenset(
    {
        KafkaError._TRANSPORT,  # noqa: SLF001 - the same
        KafkaError._ALL_BROKERS_DOWN,  # noqa: SLF001 - the same
        KafkaError._FENCED,  # noqa: SLF001 - the same
        KafkaError._FATAL,  # noqa: SLF001 - the same
        KafkaError._STATE,  # noqa: SLF001 - the same
        KafkaError._QUEUE_FULL,  # noqa: SLF001 - the same
        KafkaError._DESTROY,  # noqa: SLF001 - the same
        KafkaError.OUT_OF_ORDER_SEQUENCE_NUMBER,
        KafkaError.DUPLICATE_SEQUENCE_NUMBER,
        KafkaError.UNKNOWN_PRODUCER_ID,
        KafkaError.INVALID_PRODUCER_EPOCH,
        KafkaError.INVALID_TXN_STATE,
        KafkaError.OPERATION_NOT_ATTEMPTED,
    }
)


def blamed(error: KafkaError) -> Blamed:
    """Tell whose fault an error of a message is. What is not known is the topic's: others must not suffer from it."""
    code = error.code()
    if code in _NOBODYS_FAULT:
        return Blamed.NOBODY
    if code in _PURGED:
        return Blamed.PURGED
    if code in _MESSAGES_FAULT:
        return Blamed.MESSAGE
    return Blamed.SILENCE if code in _SILENT else Blamed.TOPIC


@dataclass(slots=True)
class Blame:
    """Why a Kafka transaction failed.

    Attributes:
        log_topic: the topic in which the writer writes down what it settled: no transaction's fault.
        has_log_failed: whether that topic refused what was for it.
        messages: of transactions that the broker refused, by id: topic and reason; the first reason counts.
        topics: topics that take nothing, with the reason.
        silent: topics that did not answer in time, with the reason.
        purged: topics whose messages were taken back.
        errors: the error of each of those messages, by id, and of each of those topics.
        cause: the first sentence to tell; empty: nothing failed.
    """

    log_topic: str = ""
    has_log_failed: bool = False
    messages: dict[str, tuple[str, str]] = field(default_factory=dict)
    topics: dict[str, str] = field(default_factory=dict)
    silent: dict[str, str] = field(default_factory=dict)
    purged: set[str] = field(default_factory=set)
    errors: dict[str, KafkaError] = field(default_factory=dict)
    cause: str = ""

    def add(self, transaction_id: str, topic: str, error: KafkaError, why: str) -> None:
        """Take in that a message was not stored; `why` is the error as a text."""
        kind = blamed(error)
        if kind is Blamed.PURGED:
            self.purged.add(topic)
            return
        if kind is Blamed.NOBODY:
            self.cause = self.cause or why
            return
        if topic and topic == self.log_topic:
            self.has_log_failed = True
            self.cause = self.cause or f"{topic} was not written: {why}"
            return
        if kind is Blamed.MESSAGE:
            self.messages.setdefault(transaction_id, (topic, f"{topic}: {why}"))
            self.errors.setdefault(transaction_id, error)
            self.cause = f"the message of transaction {transaction_id} is refused: {topic}: {why}"
            return
        (self.topics if kind is Blamed.TOPIC else self.silent).setdefault(topic, why)
        self.errors.setdefault(topic, error)
        self.cause = f"{topic} takes no message: {why}"


#: The first is what is tried again (a topic that is not there), the second what is not (one that is forbidden).
_REFUSED = re.compile(
    r'(?:AddPartitionsToTxn response:|Failed to add) partition "(?P<topic>[^"]+)":? '
    r"\[-?\d+\](?: to transaction)?: (?P<why>.+)$"
)
_FORBIDDEN = "Topic authorization failed"
#: Of AddPartitionsToTxn: they say something of the topic. The others are of the transaction, or tried again.
_TOPICS_ANSWERS = ("Unknown topic or partition", _FORBIDDEN)


def not_let_in(said: str) -> tuple[str, str] | None:
    """Return the topic that a line of the library's log says the broker did not let into a transaction, and why."""
    found = _REFUSED.search(said)
    if found is None or not any(answer in found["why"] for answer in _TOPICS_ANSWERS):
        return None
    return found["topic"], found["why"]


def is_forbidden(why: str) -> bool:
    """Tell whether a topic was not let into a transaction for want of the right to write there."""
    return _FORBIDDEN in why
