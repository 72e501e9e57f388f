"""What an operator may do with the transactions of a store in Kafka: look, decide, bring a discarded one back.

Looking needs no coordinator. A decision is an op record like anybody's: it counts if it is the first, and takes effect
when a coordinator runs. Each act is in the audit log before it is done.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from types import TracebackType
from typing import Self

from confluent_kafka import KafkaException

from penstock import clients
from penstock.clients.rights import MissingRightError, Operation, principal_of, require_rights, topic_right
from penstock.clients.topics import hidden_topics, partition_counts
from penstock.errors import DecisionNotStoredError, PenstockError, TransactionError
from penstock.options import ClientConfig
from penstock.transactions.acked_producer import ANY_SIZE, AckedProducer, LateProducer
from penstock.transactions.model import PendingTransaction
from penstock.transactions.operator.administration import Administration, Decided, Effect
from penstock.transactions.operator.audit import VERBS, Act, Audited, AuditLog, Resuming, marked
from penstock.transactions.operator.inspection import WAIT_S, Discarded, Patience
from penstock.transactions.stores.kafka.inspection import Found, KafkaInspection
from penstock.transactions.stores.kafka.status import target_text
from penstock.transactions.wire.half import encode_half
from penstock.transactions.wire.ops import Author, Op, Verdict, encode_op
from penstock.transactions.wire.topics import StoreTopics

#: Seconds that a record may take to be acknowledged.
_SEND_TIMEOUT_S = 15.0
_ANSWER_S = _SEND_TIMEOUT_S + 5.0


class KafkaAdministration(Administration):
    """An operator's hands on one store. Used by one thread; use it as a context manager.

    Its questions wait at most about `wait_s` seconds in all for brokers that do not answer at once.

    Raises `BrokerConnectionError`, `MissingRightError` where this client may not read the store, and `PenstockError`
    where there is none.
    """

    def __init__(
        self,
        bootstrap_servers: str,
        prefix: str = "penstock",
        config: ClientConfig | None = None,
        *,
        wait_s: float = WAIT_S,
    ) -> None:
        given = config or {}
        self._admin = clients.admin(bootstrap_servers, given)
        self._patience = Patience(wait_s)
        topics = StoreTopics(prefix)
        with self._patience.waiting():
            counts = partition_counts(self._admin, self._patience.limit_s)
            unseen = [log for log in (topics.half, topics.op, topics.done) if log not in counts]
            hidden = hidden_topics(self._admin, unseen, self._patience.limit_s)
        if hidden:
            rights = [topic_right(Operation.READ, name) for name in hidden]
            raise MissingRightError(f"the store {prefix} cannot be read, if it is there", rights, principal_of(given))
        if topics.half not in counts:
            raise PenstockError(
                f"there is no topic {topics.half} at {bootstrap_servers}; name the store by --prefix, or start a "
                "coordinator, which makes it"
            )
        self._counts = counts
        self._topics = StoreTopics(prefix, counts[topics.half])
        self._inspection = KafkaInspection(bootstrap_servers, given, self._topics, self._patience)
        # A half that is resumed has a header more than before.
        settings, name = {**ANY_SIZE, **given}, f"operator-{prefix}"
        self._sends = LateProducer(lambda: AckedProducer(bootstrap_servers, settings, _SEND_TIMEOUT_S, name))
        self._audit = AuditLog(self._topics, self._admin, self._sends, self._inspection)
        self._resuming = Resuming(self._topics, self._inspection, self._audit, self._topics.may_publish_to)

    def __enter__(self) -> Self:
        self._inspection.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._inspection.__exit__(kind, error, traceback)
        self._sends.stop(_SEND_TIMEOUT_S)

    def pending(self) -> Sequence[PendingTransaction]:
        """Return what is not settled, oldest first. Ages are by this machine's clock."""
        found = self._inspection.pending()
        missing = self._missing(found)
        now_ms = time.time() * 1000
        return [it.described(now_ms, missing) for it in found]

    def show(self, transaction_id: str) -> PendingTransaction | None:
        """Return one pending transaction, or None."""
        found = self.find(transaction_id)
        return None if found is None else self.describe(found)

    def find(self, transaction_id: str) -> Found | None:
        """Return one pending transaction with its messages, or None."""
        return self._inspection.find(transaction_id)

    def discarded(self) -> list[Discarded]:
        """Return what lies in the discarded topic, oldest first; also what was brought back since, with who did so."""
        return marked(self._inspection.discarded(), self._audit.read(), self._topics)

    def coordinator_notices(self) -> list[str]:
        """Return what the status of the coordinators shows to be wrong, a line for each."""
        read = self._inspection.statuses
        statuses = self._inspection.seen_statuses() if read is None else read
        if self._inspection.unseen:
            return [f"the status of the coordinators is not seen: {self._inspection.unseen}"]
        return [line for status in statuses for line in status.lines()]

    def acts(self, transaction_id: str | None = None) -> list[Audited]:
        """Return what operators did, oldest first; to one transaction, or to all."""
        return self._audit.read(transaction_id)

    def decide(
        self, transaction_id: str, verdict: Verdict, actor: str, why: str = "", timeout_s: float = 30.0
    ) -> Decided:
        """Write the act down, store the decision, and wait until it took effect.

        It counts if it is the first. A ROLLBACK also counts against a COMMIT whose message waits for its `deliver_at`,
        and a DISCARD against one that its target does not take. Waits at most `timeout_s` seconds for the effect.

        Raises:
            TransactionError: it is not pending, or not all of its messages are there.
            DecisionNotStoredError: the decision is not known to be stored.
            PenstockError: the act could not be written down; nothing was done.
        """
        found = self.find(transaction_id)
        if found is None:
            raise TransactionError(
                f"transaction {transaction_id} is not pending: it is settled, or never was; "
                "`penstock tx show` tells whether it was discarded"
            )
        pending, number = found.pending, found.half_partition
        if pending.verdict is not None and not self._may_follow(found, verdict):
            return Decided(Effect.REFUSED, pending.verdict, self.describe(found).waits_for)
        if not pending.is_complete and verdict is not Verdict.ROLLBACK:
            raise TransactionError(f"not all messages of transaction {transaction_id} are stored: only roll it back")
        group, place = pending.half.group, f"{self._topics.half}[{number}]@{pending.offset}"
        self._audit.write(Act(actor, VERBS[verdict], transaction_id, group, place, why))
        return self.apply(found, verdict, Author.OPERATOR, actor, timeout_s)

    def apply(self, found: Found, verdict: Verdict, author: Author, actor: str, timeout_s: float) -> Decided:
        """Store a decision, and wait at most `timeout_s` seconds until it took effect.

        Raises `DecisionNotStoredError` where it is not known to be stored.
        """
        pending, number = found.pending, found.half_partition
        done_from = self._inspection.end(self._topics.done, number)
        op_offset = self._send(
            Op(found.transaction_id, verdict, author, pending.group, number, pending.offsets, 0, actor)
        )
        note = self._inspection.await_end(found, done_from, timeout_s)
        if note is not None:
            return Decided(Effect.DONE if note.op_offset == op_offset else Effect.REFUSED, note.verdict)
        now = self.find(found.transaction_id)
        if now is None or now.pending.verdict is None:
            return Decided(Effect.WAITS, None, "a coordinator")
        ours = now.pending.decided_at == op_offset
        return Decided(Effect.WAITS if ours else Effect.REFUSED, now.pending.verdict, self.describe(now).waits_for)

    def end_of(self, transaction_id: str) -> Verdict | None:
        """Return how a transaction was settled, as far as the done log still says so."""
        ends = (self._inspection.ends_of(transaction_id, number, 0) for number in range(self._topics.partitions))
        return next((note.verdict for note in ends if note is not None), None)

    def settle(self, transaction_id: str, verdict: Verdict, actor: str, why: str, timeout_s: float) -> Decided:
        """Do what `decide` does."""
        return self.decide(transaction_id, verdict, actor, why, timeout_s)

    def _may_follow(self, found: Found, verdict: Verdict) -> bool:
        """Tell whether a decision may count though another one stands; the coordinator judges it.

        What is committed and not due can be taken back; what its target refuses can be discarded.
        """
        pending = found.pending
        if pending.verdict is not Verdict.COMMIT:
            return False
        if verdict is Verdict.ROLLBACK:
            return pending.half.deliver_at_ms is not None
        by_target = target_text(pending.topics, self._inspection.statuses or ())
        return verdict is Verdict.DISCARD and bool(by_target or self._missing([found]))

    def resume(self, transaction_id: str, actor: str, why: str = "", *, again: bool = False) -> int:
        """Bring a discarded transaction back, undecided, with a fresh count of checks; return its messages.

        The act in the audit log is the claim: what stands at a place of the discarded topic is brought back once.

        Raises:
            TransactionError: it is not in the discarded topic; or it was brought back before and `again` is not set, or
                is pending since.
            MissingRightError: this client may not store halves, or not look for claims; nothing was done.
            PenstockError: the act could not be written down, or a half not be stored; then try again with `again`.
        """
        if again and self.find(transaction_id) is not None:
            raise TransactionError(
                f"transaction {transaction_id} is pending: there is nothing to bring back; see what it waits for with "
                "`penstock tx show`"
            )
        # Before the claim: what may not be stored after it would count as brought back.
        needed = [
            topic_right(Operation.WRITE, self._topics.half),
            topic_right(Operation.READ, self._topics.audit),
            topic_right(Operation.WRITE, self._topics.audit),
        ]
        require_rights(self._admin, f"transaction {transaction_id} cannot be brought back", needed)
        halves = self._resuming.claim(transaction_id, actor, why, again=again)
        first = halves[0]
        keys = (first.order_key, first.key, transaction_id.encode())
        to = self._topics.half_partition(next(key for key in keys if key is not None))
        sends = self._sends()
        try:
            for half in halves:
                sends.store(self._topics.half, to, half.key, half.value, encode_half(half), limit_s=_ANSWER_S)
        except (KafkaException, PenstockError) as error:
            raise PenstockError(
                f"a half of transaction {transaction_id} is not known to be stored: {error}; look with "
                "`penstock tx show`, and if it is not pending, resume it with --again"
            ) from error
        return len(halves)

    def _send(self, op: Op) -> int:
        """Store a decision and return the offset of its record."""
        try:
            key = op.transaction_id.encode()
            return self._sends().store(self._topics.op, op.half_partition, key, encode_op(op), limit_s=_ANSWER_S)
        except (KafkaException, PenstockError) as error:
            raise DecisionNotStoredError(
                f"the decision of transaction {op.transaction_id} is not known to be stored: {error}; "
                "try again: a second one harms nothing"
            ) from error

    def describe(self, found: Found) -> PendingTransaction:
        """Return a pending transaction as an operator sees it."""
        return found.described(time.time() * 1000, self._missing([found]))

    def _missing(self, found: Collection[Found]) -> set[str]:
        """Return those target topics that do not exist."""
        missing = {half.topic for it in found for half in it.pending.halves} - self._counts.keys()
        if not missing:
            return missing
        with self._patience.waiting():
            missing -= partition_counts(self._admin, self._patience.limit_s).keys()
            # What this client may not see may be there.
            return missing.difference(hidden_topics(self._admin, missing, self._patience.limit_s))
