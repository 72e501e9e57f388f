"""Which operator did what, and why: the audit log of a store, one record for each act, kept for ever.

A record is written before the act it speaks of, so nothing is done that is not there; an act may have failed, or have
come too late, after its record was written. The topic has one partition: of two who bring the same message back, the
log says who was first.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import NamedTuple

from confluent_kafka import KafkaException, Message
from confluent_kafka.admin import AdminClient

from penstock.clients.requests.topics import TopicSpec, ensure_topics
from penstock.clients.rights import Operation, principal_of
from penstock.errors import PenstockError, StoppedError
from penstock.options import ClientConfig
from penstock.transactions.operator.inspection import Inspection
from penstock.transactions.wire.ops import Verdict
from penstock.transactions.wire.topics import BROKER_TIME, KEPT, StoreTopics
from penstock.transactions.writing.acked_producer import AckedProducer

#: Seconds that a record may take to be acknowledged.
_ANSWER_S = 20.0
#: What decisions are called in the log.
VERBS = {Verdict.COMMIT: "commit", Verdict.ROLLBACK: "rollback", Verdict.DISCARD: "discard"}


class Act(NamedTuple):
    """What an operator did, or began to do. Its fields are those of the record, by their names."""

    who: str
    #: `commit`, `rollback`, `discard` or `resume`.
    what: str
    #: Its id.
    transaction: str
    group: str
    #: Topic, partition and offset.
    place: str
    why: str = ""


class Audited(NamedTuple):
    """A record of the audit log."""

    act: Act
    offset: int
    #: By the broker's clock, in milliseconds since the epoch.
    at_ms: int


class AuditLog:
    """The audit log of one store. Used by one thread.

    Its topic is made at the first act; `sends` returns a producer that is started.
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
        """Write an act down, durably, and return its offset. After a `PenstockError` the act must not be done."""
        ensure_topics(
            self._admin,
            self._bootstrap_servers,
            [TopicSpec(self._topic, 1, KEPT | BROKER_TIME)],
            needs={self._topic: (Operation.READ, Operation.WRITE)},
            principal=principal_of(self._config),
            of_store=True,
        )
        value = json.dumps(act._asdict()).encode()
        try:
            receipt = self._sends().send(self._topic, 0, act.transaction.encode(), value)
            stored = receipt.wait(_ANSWER_S)
        except (KafkaException, StoppedError) as error:
            raise PenstockError(f"{self._topic} cannot be written: {error}; nothing was done") from error
        if not stored:
            raise PenstockError(f"{self._topic} was not written: {receipt.error}; nothing was done, try again")
        return receipt.offset

    def read(self, transaction_id: str | None = None) -> list[Audited]:
        """Return what was done, oldest first; to one transaction, or to all. Raises as `Inspection.read`."""
        return read_audit(self._inspection, self._topic, transaction_id)


def _audited(message: Message) -> Audited | None:
    """Read a record; None where somebody else wrote it."""
    try:
        fields = json.loads(message.value() or b"")
        act = Act(*(str(fields[name]) for name in Act._fields))
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return Audited(act, message.offset() or 0, message.timestamp()[1])


def read_audit(inspection: Inspection, topic: str, transaction_id: str | None = None) -> list[Audited]:
    """Return what was done, oldest first; to one transaction, or to all. Nobody has to write it for that."""
    if not inspection.partitions_of(topic):
        return []
    found = (_audited(message) for message in inspection.read(topic, {0: 0}))
    return [written for written in found if written is not None and transaction_id in {None, written.act.transaction}]
