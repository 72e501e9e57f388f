"""The cause of a failed Kafka transaction: a message, a topic, or neither; and the errors of a writer.

One taxonomy for all that writes in Kafka transactions. Some causes are only in the client library's log: if the broker
keeps a topic out of a transaction, all messages of the transaction fail as purged (librdkafka 2.16, seen with a deleted
topic).
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
    """The broker cannot end the open transaction of a transactional id. Its outcome is settled; use another id."""


class NotOpenedError(PenstockError):
    """The producer cannot start now: try again. `rights` has the missing permissions, if that is the reason."""

    def __init__(self, text: str, rights: Sequence[Right] = ()) -> None:
        super().__init__(text)
        self.rights = rights


class GivenUpError(PenstockError):
    """The owner of a writer gave its transaction up before the commit began: nothing of it becomes visible."""


class Blamed(Enum):
    """What is to blame for the error of a message."""

    NOBODY = "nobody"
    MESSAGE = "message"
    TOPIC = "topic"
    #: The topic, if the broker answers other requests.
    SILENCE = "silence"
    #: Nothing: the message was purged, queued or in flight, because another one failed.
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
    # A message names its partition, and its topic has no such partition. Without a topic the error is another one.
    KafkaError._UNKNOWN_PARTITION,  # noqa: SLF001 - the same
}
_SILENT = frozenset({KafkaError._MSG_TIMED_OUT, KafkaError._TIMED_OUT, KafkaError.REQUEST_TIMED_OUT})  # noqa: SLF001 - the same
_PURGED = frozenset({KafkaError._PURGE_QUEUE, KafkaError._PURGE_INFLIGHT})  # noqa: SLF001 - the same
#: Errors because another message failed, the producer was fenced, or the brokers are away.
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
    """Return what is to blame for the error of a message. Unknown errors blame the topic: others must not suffer."""
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
        log_topic: the topic of the records of what was settled. Its failure is no transaction's fault.
        has_log_failed: whether that topic refused its record.
        messages: topic and reason of each refused transaction, by id; the first reason counts.
        topics: topics that accept no message, with the reason.
        silent: topics that did not answer in time, with the reason.
        purged: topics whose messages were purged.
        errors: the error of each of those messages, by id, and of each of those topics.
        cause: the cause as a sentence; empty: nothing failed.
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
        """Note that a message was not stored; `why` is the error as text."""
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
            # A consumer's messages belong to no transaction of a store.
            what = f"the message of transaction {transaction_id}" if transaction_id else "a message"
            self.cause = f"{what} is refused: {topic}: {why}"
            return
        (self.topics if kind is Blamed.TOPIC else self.silent).setdefault(topic, why)
        self.errors.setdefault(topic, error)
        self.cause = f"{topic} takes no message: {why}"


#: Log lines about topics. The first form is retried (an absent topic), the second is not (a forbidden topic).
_REFUSED = re.compile(
    r'(?:AddPartitionsToTxn response:|Failed to add) partition "(?P<topic>[^"]+)":? '
    r"\[-?\d+\](?: to transaction)?: (?P<why>.+)$"
)
_FORBIDDEN = "Topic authorization failed"
#: Answers to AddPartitionsToTxn that concern the topic. Other answers concern the transaction, or are retried.
_TOPICS_ANSWERS = ("Unknown topic or partition", _FORBIDDEN)


def not_let_in(said: str) -> tuple[str, str] | None:
    """Return the topic and the reason, if a log line says that the broker kept a topic out of a transaction."""
    found = _REFUSED.search(said)
    if found is None or not any(answer in found["why"] for answer in _TOPICS_ANSWERS):
        return None
    return found["topic"], found["why"]


def is_forbidden(why: str) -> bool:
    """Tell whether a topic was kept out of a transaction because the permission to write is missing."""
    return _FORBIDDEN in why
