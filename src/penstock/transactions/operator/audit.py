"""The audit log of a store, and the discarded transactions, both in Kafka.

The audit log has one record for each action: the operator, the action and the reason, kept for ever. A record is
written before its action, so every action has a record; the action may have failed, or come too late, after that. The
topic has one partition: if two operators bring the same discarded message back, the log says who was first. The store
then stores the halves.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace

from confluent_kafka import KafkaException, Message

from penstock.clients.rights import Operation
from penstock.clients.topics import TopicSpec, ensure_topics
from penstock.errors import MessageFormatError, PenstockError, TransactionError
from penstock.transactions.acked_producer import ANY_SIZE, AckedProducer, wire_headers
from penstock.transactions.operator.administration import Act, Discarded
from penstock.transactions.operator.inspection import Inspection
from penstock.transactions.wire.half import Half, decode_discarded
from penstock.transactions.wire.ops import Verdict
from penstock.transactions.wire.topics import BROKER_TIME, KEPT

#: Seconds that the client tries to send a record.
_SEND_TIMEOUT_S = 15.0
#: Seconds that a record may take until its acknowledgement.
ANSWER_S = _SEND_TIMEOUT_S + 5.0
#: The names of decisions in the log.
VERBS = {Verdict.COMMIT: "commit", Verdict.ROLLBACK: "rollback", Verdict.DISCARD: "discard"}
#: The fields of a record: those of `Act` without offset and time.
_FIELDS = ("who", "what", "transaction", "group", "place", "why")


@dataclass(frozen=True, slots=True)
class DiscardedMessage(Discarded):
    """A record of the discarded topic."""

    half: Half
    partition: int
    offset: int


class AuditLog(Inspection):
    """Reads and writes the audit log of one store, and reads its discarded transactions. For one thread."""

    _made: AckedProducer | None = None

    def __exit__(self, kind: type[BaseException] | None, *raised: object) -> None:
        super().__exit__(kind, *raised)
        if self._made is not None:
            self._made.stop(_SEND_TIMEOUT_S)

    @property
    def producer(self) -> AckedProducer:
        """The producer for the store's topics. Made at the first use: a reader may have no write permission."""
        if self._made is None:
            # A half that is brought back has one more header than before.
            settings, name = {**ANY_SIZE, **self.admin.config}, f"operator-{self.topics.prefix}"
            self._made = AckedProducer(self.admin.servers, settings, _SEND_TIMEOUT_S, name)
            self._made.start()
        return self._made

    def write(self, act: Act) -> int:
        """Write a durable record and return its offset. After a `PenstockError` the caller must not act.

        The first record creates the topic.
        """
        topic = self.topics.audit
        ensure_topics(
            self.admin,
            [TopicSpec(topic, 1, KEPT | BROKER_TIME)],
            needs={topic: (Operation.READ, Operation.WRITE)},
            of_store=True,
        )
        value = json.dumps(dict(zip(_FIELDS, act, strict=False))).encode()
        try:
            return self.producer.store(topic, 0, act.transaction.encode(), value, limit_s=ANSWER_S)
        except (KafkaException, PenstockError) as error:
            raise PenstockError(f"{topic} was not written: {error}; nothing was done, try again") from error

    def acts(self, transaction_id: str | None = None) -> list[Act]:
        """Return the actions on one transaction or on all, oldest first. Raises as `Inspection`."""
        acts = map(_audited, self.read_all(self.topics.audit))
        return [act for act in acts if act is not None and transaction_id in {None, act.transaction}]

    def discarded(self) -> list[DiscardedMessage]:
        """Return the records of the discarded topic, oldest first, each with the operator who brought it back."""
        decoded = map(_discarded, self.read_all(self.topics.discarded))
        records = sorted((record for record in decoded if record is not None), key=lambda record: record.at_ms)
        claims = {act.place: act.who for act in self.acts() if act.what == "resume"}
        # A claim names the first message of a transaction, and counts for all messages of the same life.
        lives = {_life(record): claims[place] for record in records if (place := self._place(record)) in claims}
        return [replace(record, resumed_by=lives.get(_life(record), "")) for record in records]

    def claim(
        self, transaction_id: str, actor: str, why: str, *, again: bool, may_publish_to: Callable[[str], bool]
    ) -> list[Half]:
        """Record that a discarded transaction is brought back; return its halves in their order, for the store.

        If it was discarded several times, the last life counts. `may_publish_to` tells whether a message may have a
        topic as its target. Raises `TransactionError` if a message of it is not in the discarded topic, if a target
        belongs to a store, or if it was brought back before and `again` is False; and as `write`.
        """
        topic = self.topics.discarded
        records = (record for record in self.discarded() if record.transaction_id == transaction_id)
        by_part = {record.half.part or (0, 0): record for record in records}
        if not by_part:
            raise TransactionError(f"transaction {transaction_id} is not in {topic}")
        discarded = [by_part[part] for part in sorted(by_part)]
        first = discarded[0]
        parts = first.half.part[1] if first.half.part is not None else 1
        if len(discarded) < parts:
            raise TransactionError(
                f"only {len(discarded)} of {parts} messages of transaction {transaction_id} are in {topic}: it is not "
                "brought back in part; send those that are there by hand"
            )
        for target in [record.half.topic for record in discarded if not may_publish_to(record.half.topic)]:
            raise TransactionError(f"transaction {transaction_id} is forged: its target, {target}, belongs to a store")
        place = self._place(first)
        if first.resumed_by and not again:
            raise _brought_back(place, first.resumed_by)
        claim = self.write(Act(actor, "resume", transaction_id, first.group, place, why))
        # Two operators may act at the same time: the order of the log decides.
        earliest = next((act for act in self.acts() if (act.what, act.place) == ("resume", place)), None)
        if earliest is not None and earliest.offset != claim and not again:
            raise _brought_back(place, earliest.who)
        # The offset of the claim makes the name of each life unique.
        return [record.half._replace(resumed=f"{self._place(record)}#{claim}") for record in discarded]

    def _place(self, record: DiscardedMessage) -> str:
        """Return the place of a discarded message, as claims name it."""
        return f"{self.topics.discarded}[{record.partition}]@{record.offset}"


def _life(record: DiscardedMessage) -> tuple[str, str]:
    """Return the id and the offset of the claim that began this life; empty for the first life."""
    return record.transaction_id, (record.half.resumed or "").rpartition("#")[2]


def _brought_back(place: str, who: str) -> TransactionError:
    return TransactionError(
        f"the message at {place} was brought back before, by {who}; with `again` it may become visible twice"
    )


def _audited(message: Message) -> Act | None:
    """Decode a record of the audit log; None if it has another format."""
    try:
        fields = json.loads(message.value() or b"")
        return Act._make([*(str(fields[name]) for name in _FIELDS), message.offset(), message.timestamp()[1]])
    except (ValueError, KeyError, TypeError, RecursionError):
        return None


def _discarded(message: Message) -> DiscardedMessage | None:
    """Decode a record of the discarded topic; None if it has another format."""
    try:
        half, reason, check_count = decode_discarded(message.key(), message.value(), wire_headers(message))
    except MessageFormatError:
        return None
    fields = (half.transaction_id, half.group, (half.topic,), reason, check_count, message.timestamp()[1], "")
    return DiscardedMessage(*fields, half, message.partition() or 0, message.offset() or 0)
