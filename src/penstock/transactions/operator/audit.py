"""Which operator did what, and why: the audit log of a store, one record for each act, kept for ever.

A record is written before the act it speaks of, so nothing is done that is not there; an act may have failed, or have
come too late, after its record was written. The topic has one partition: of two who bring the same discarded message
back, the log says who was first. What is done with the halves of those is the store's.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from confluent_kafka import KafkaException, Message

from penstock.clients.factory import AdminClient
from penstock.clients.rights import Operation
from penstock.clients.topics import TopicSpec, ensure_topics
from penstock.errors import PenstockError, TransactionError
from penstock.transactions.acked_producer import AckedProducer
from penstock.transactions.operator.inspection import Discarded, Inspection
from penstock.transactions.wire.half import Half
from penstock.transactions.wire.ops import Verdict
from penstock.transactions.wire.topics import BROKER_TIME, KEPT, StoreTopics

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
        self, topics: StoreTopics, admin: AdminClient, sends: Callable[[], AckedProducer], inspection: Inspection
    ) -> None:
        self._topic = topics.audit
        self._admin = admin
        self._sends = sends
        self._inspection = inspection

    def write(self, act: Act) -> int:
        """Write an act down, durably, and return its offset. After a `PenstockError` the act must not be done."""
        ensure_topics(
            self._admin,
            [TopicSpec(self._topic, 1, KEPT | BROKER_TIME)],
            needs={self._topic: (Operation.READ, Operation.WRITE)},
            of_store=True,
        )
        value = json.dumps(act._asdict()).encode()
        try:
            return self._sends().store(self._topic, 0, act.transaction.encode(), value, limit_s=_ANSWER_S)
        except (KafkaException, PenstockError) as error:
            raise PenstockError(f"{self._topic} was not written: {error}; nothing was done, try again") from error

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


class Resuming:
    """Claims discarded transactions of one store, unless they name a target to which none may be published.

    Used by one thread.
    """

    def __init__(
        self, topics: StoreTopics, inspection: Inspection, audit: AuditLog, may_publish_to: Callable[[str], bool]
    ) -> None:
        self._topics = topics
        self._may_publish_to = may_publish_to
        self._inspection = inspection
        self._audit = audit

    def claim(self, transaction_id: str, actor: str, why: str = "", *, again: bool = False) -> list[Half]:
        """Write down that a discarded transaction is brought back, and return its halves to be stored, in their order.

        Of several lives it is the last one. Raises `TransactionError` where it is not wholly in the discarded topic,
        names a topic of a store as its target, or was brought back before and not `again`; and as `AuditLog.write`.
        """
        discarded = self._newest_life(transaction_id)
        if not discarded:
            raise TransactionError(f"transaction {transaction_id} is not in {self._topics.discarded}")
        first = discarded[0]
        parts = first.half.part[1] if first.half.part is not None else 1
        if len(discarded) < parts:
            raise TransactionError(
                f"only {len(discarded)} of {parts} messages of transaction {transaction_id} are in "
                f"{self._topics.discarded}: it is not brought back in part; send those that are there by hand"
            )
        for topic in [it.half.topic for it in discarded if not self._may_publish_to(it.half.topic)]:
            raise TransactionError(f"transaction {transaction_id} is forged: its target, {topic}, belongs to a store")
        place = place_of(self._topics, first)
        if not again:
            self._refuse_second(place, None)
        claim = self._audit.write(Act(actor, "resume", transaction_id, first.half.group, place, why))
        if not again:
            # Two may have looked at the same time: the log has one order.
            self._refuse_second(place, claim)
        # With the claim in it, no two lives have the same name.
        return [it.half._replace(resumed=f"{place_of(self._topics, it)}#{claim}") for it in discarded]

    def _newest_life(self, transaction_id: str) -> list[Discarded]:
        """Return the messages of a discarded transaction, in the order of their parts; of several lives the last."""
        by_part: dict[tuple[int, int] | None, Discarded] = {}
        for record in self._inspection.discarded():
            if record.half.transaction_id == transaction_id:
                by_part[record.half.part] = record
        return [by_part[part] for part in sorted(by_part, key=lambda part: part or (0, 0))]

    def _refuse_second(self, place: str, claim: int | None) -> None:
        resumed = (
            written for written in self._audit.read() if (written.act.what, written.act.place) == ("resume", place)
        )
        first = next(resumed, None)
        if first is not None and first.offset != claim:
            raise TransactionError(
                f"what stands at {place} was brought back before, by {first.act.who}; with `again` it may become "
                "visible twice"
            )


def place_of(topics: StoreTopics, message: Discarded) -> str:
    """Return where a discarded message stands, as claims name it."""
    return f"{topics.discarded}[{message.partition}]@{message.offset}"


def marked(discarded: Sequence[Discarded], acts: Sequence[Audited], topics: StoreTopics) -> list[Discarded]:
    """Return all discarded messages, each with who brought it back by the audit log, if somebody did."""
    claims = {act.act.place: act.act.who for act in acts if act.act.what == "resume"}
    # A claim names the first message of a transaction, and is for all of that life.
    lives = {_life(message): claims[place] for message in discarded if (place := place_of(topics, message)) in claims}
    return [replace(message, resumed_by=lives.get(_life(message), "")) for message in discarded]


def _life(message: Discarded) -> tuple[str, str]:
    """Return the id and the claim that this life began with, empty for the first one."""
    return message.half.transaction_id, (message.half.resumed or "").rpartition("#")[2]
