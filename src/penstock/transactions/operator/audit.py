"""Which operator did what, and why: the audit log of a store, one record for each act, kept for ever.

A record is written before the act it speaks of, so nothing is done that is not there; an act may have failed, or have
come too late, after its record was written. The topic has one partition: of two who bring the same message back, the
log says who was first.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from confluent_kafka import KafkaException, Message
from confluent_kafka.admin import AdminClient

from penstock.clients.rights import Operation, principal_of
from penstock.clients.topics import TopicSpec, ensure_topics
from penstock.errors import PenstockError, StoppedError
from penstock.options import ClientConfig
from penstock.transactions.operator.inspection import Inspection
from penstock.transactions.wire.ops import Verdict
from penstock.transactions.wire.topics import StoreTopics
from penstock.transactions.writing.acked_producer import AckedProducer

_KEPT = {
    "cleanup.policy": "delete",
    "retention.ms": "-1",
    "retention.bytes": "-1",
    "message.timestamp.type": "LogAppendTime",
}
#: Seconds that a record may take to be acknowledged.
_ANSWER_S = 20.0
#: What decisions are called in the log.
VERBS = {Verdict.COMMIT: "commit", Verdict.ROLLBACK: "rollback", Verdict.DISCARD: "discard"}
_FIELDS = ("who", "what", "transaction", "group", "place", "why")


@dataclass(frozen=True, slots=True)
class Act:
    """What an operator did, or began to do.

    Attributes:
        who: the operator.
        what: `commit`, `rollback`, `discard` or `resume`.
        transaction: id of the transaction.
        group: its producer group.
        place: where it was: topic, partition and offset.
        why: the reason that was given, or an empty text.
    """

    who: str
    what: str
    transaction: str
    group: str
    place: str
    why: str = ""


@dataclass(frozen=True, slots=True)
class Audited:
    """A record of the audit log.

    Attributes:
        act: what was done.
        offset: where it stands in the log.
        at_ms: when, by the broker's clock, in milliseconds since the epoch.
    """

    act: Act
    offset: int
    at_ms: int


class AuditLog:
    """The audit log of one store. Used by one thread.

    Args:
        bootstrap_servers: Kafka's addresses.
        config: client settings by librdkafka's names.
        topics: the store's topics.
        admin: makes the topic at the first act.
        sends: returns acknowledged sends, started; called when something is written.
        inspection: reads topics.
    """

    def __init__(
        self,
        bootstrap_servers: str,
        config: ClientConfig,
        *,
        topics: StoreTopics,
        admin: AdminClient,
        sends: Callable[[], AckedProducer],
        inspection: Inspection,
    ) -> None:
        self._bootstrap_servers = bootstrap_servers
        self._config = config
        self._topic = topics.audit
        self._admin = admin
        self._sends = sends
        self._inspection = inspection

    def write(self, act: Act) -> int:
        """Write an act down, durably, and return its offset.

        Raises:
            PenstockError: it is not known to be stored; the act must not be done.
        """
        ensure_topics(
            self._admin,
            self._bootstrap_servers,
            [TopicSpec(self._topic, 1, _KEPT)],
            needs={self._topic: (Operation.READ, Operation.WRITE)},
            principal=principal_of(self._config),
        )
        value = json.dumps({name: getattr(act, name) for name in _FIELDS}).encode()
        try:
            receipt = self._sends().send(self._topic, 0, act.transaction.encode(), value)
            stored = receipt.wait(_ANSWER_S)
        except (KafkaException, StoppedError) as error:
            raise PenstockError(f"{self._topic} cannot be written: {error}; nothing was done") from error
        if not stored:
            raise PenstockError(f"{self._topic} was not written: {receipt.error}; nothing was done, try again")
        return receipt.offset

    def read(self, transaction_id: str | None = None) -> list[Audited]:
        """Return what was done, oldest first; to one transaction, or to all.

        Raises:
            BrokerConnectionError: a broker does not answer.
        """
        return read_audit(self._inspection, self._topic, transaction_id)


def _audited(message: Message) -> Audited | None:
    """Read a record; None where somebody else wrote it."""
    try:
        fields = json.loads(message.value() or b"")
        act = Act(*(str(fields[name]) for name in _FIELDS))
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return Audited(act, message.offset() or 0, message.timestamp()[1])


def read_audit(inspection: Inspection, topic: str, transaction_id: str | None = None) -> list[Audited]:
    """Return what was done, oldest first; to one transaction, or to all. Nobody has to write it for that.

    Raises:
        BrokerConnectionError: a broker does not answer.
    """
    if not inspection.partitions_of(topic):
        return []
    found = (_audited(message) for message in inspection.read(topic, {0: 0}))
    return [one for one in found if one is not None and transaction_id in {None, one.act.transaction}]


def acts_on(log: list[Audited], what: str, place: str) -> Iterator[Audited]:
    """Yield what was done of a kind to what stood at a place."""
    return (one for one in log if one.act.what == what and one.act.place == place)
