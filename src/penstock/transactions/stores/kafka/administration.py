"""The operator's acts on a store in Kafka: list, decide, and resume discarded transactions.

Listing needs no coordinator. A decision is an op record like any other: it counts if it is the first, and takes effect
when a coordinator runs. Each act is written into the audit log first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from confluent_kafka import KafkaError, KafkaException

from penstock.clients.answers import answered
from penstock.clients.bounded_calls import ask_again
from penstock.clients.groups import describe_groups
from penstock.clients.kafka_errors import code_of
from penstock.clients.rights import MissingRightError, Operation, require_rights, topic_right
from penstock.clients.topics import hidden_topics, partition_counts
from penstock.errors import DecisionNotStoredError, PenstockError, TransactionError, TransactionRefusedError
from penstock.options import ClientConfig
from penstock.transactions.model import PendingTransaction
from penstock.transactions.operator.administration import Act, Administration
from penstock.transactions.operator.audit import ANSWER_S, VERBS, AuditLog
from penstock.transactions.operator.inspection import WAIT_S
from penstock.transactions.stores.kafka.inspection import (
    Found,
    end_of,
    found_in,
    read_partitions,
    read_statuses,
)
from penstock.transactions.stores.kafka.status import Status, target_text
from penstock.transactions.wire.half import encode_half
from penstock.transactions.wire.ops import Author, Op, Verdict, encode_op
from penstock.transactions.wire.topics import StoreTopics, log_partitions

#: Seconds between two looks whether a transaction is settled.
_SETTLED_POLL_S = 0.3


class KafkaAdministration(AuditLog, Administration):
    """An operator's access to one store, as a context manager. Used by one thread.

    Each read waits about `wait_s` seconds at most for slow brokers.

    Raises `BrokerConnectionError`, `MissingRightError` if this client may not read the store, `PenstockError` if there
    is no such store or a log of it is missing, and `ConfigurationError` if its logs have different partition counts.
    """

    def __init__(
        self,
        bootstrap_servers: str,
        prefix: str = "penstock",
        config: ClientConfig | None = None,
        *,
        wait_s: float = WAIT_S,
    ) -> None:
        topics = StoreTopics(prefix)
        super().__init__(bootstrap_servers, config or {}, topics, wait_s)
        self._wait_s = wait_s
        # The statuses read last, and the reason if none could be read.
        self._statuses: Sequence[Status] = ()
        self._unseen = ""
        counts = self.ask(lambda limit_s: partition_counts(self.admin, limit_s))
        unseen = [log for log in (topics.half, topics.op, topics.done) if log not in counts]
        if hidden := self.ask(lambda limit_s: hidden_topics(self.admin, unseen, limit_s)):
            rights = [topic_right(Operation.READ, name) for name in hidden]
            raise MissingRightError(f"the store {prefix} cannot be read, if it is there", rights, self.principal)
        if unseen:
            raise PenstockError(
                f"there is no topic {unseen[0]} at {bootstrap_servers}; name the store by --prefix, or start a "
                "coordinator, which makes it"
            )
        self.topics = StoreTopics(prefix, log_partitions(topics, counts))

    def pending(self) -> Sequence[PendingTransaction]:
        """Return the pending transactions, oldest first. Ages use this machine's clock."""
        return [found.shown for found in self._read()]

    def show(self, transaction_id: str) -> PendingTransaction | None:
        """Return one pending transaction, or None."""
        found = self.find(transaction_id)
        return None if found is None else found.shown

    def find(self, transaction_id: str) -> Found | None:
        """Return one pending transaction with its messages, or None."""
        return next(
            (found for found in self._read(transaction_id) if found.pending.transaction_id == transaction_id), None
        )

    def _read(self, kept: str | None = None) -> list[Found]:
        read = read_partitions(self, kept)
        # Last: if the broker of the status topic is away, the list is still complete.
        self._statuses, self._unseen = read_statuses(self)
        return found_in(read, self._statuses)

    def notices(self, pending: Sequence[PendingTransaction]) -> list[str]:
        """Return a line for each group without a producer, and for each problem that a coordinator reports."""
        waiting = sorted({entry.group for entry in pending if entry.decided is None and not entry.waits_for})
        alone = [
            f"no producer of group {group} is alive that answers checks: its undecided transactions wait until one "
            "with a check function starts, or for `penstock tx commit` or `rollback`"
            for group in self._without_producers(waiting)
        ]
        if self._unseen:
            return [*alone, f"the status of the coordinators is not seen: {self._unseen}"]
        return [*alone, *(line for status in self._statuses for line in status.lines())]

    def _without_producers(self, groups: Sequence[str]) -> Iterator[str]:
        """Yield the producer groups without a live producer that answers checks."""
        checkers = {self.topics.checkers(group): group for group in groups}
        for name, answer in describe_groups(self.admin, checkers).items() if checkers else ():
            try:
                has_members = bool(answered(answer, self._wait_s).members)
            except KafkaException as error:
                # After another error it is unknown, and nothing is reported.
                has_members = code_of(error) != KafkaError.GROUP_ID_NOT_FOUND
            if not has_members:
                yield checkers[name]

    def decide(self, transaction_id: str, verdict: Verdict, actor: str, why: str = "", timeout_s: float = 0.0) -> str:
        """Store an operator's decision; see `Administration.decide`. A coordinator must run to apply it."""
        found = self.find(transaction_id)
        if found is None:
            raise TransactionError(
                f"transaction {transaction_id} is not pending: it is settled, or never was; "
                "`penstock tx show` tells whether it was discarded"
            )
        pending, number = found.pending, found.half_partition
        stands, waits = pending.verdict, found.shown.waits_for
        if stands is None or self._may_follow(found, verdict):
            if not pending.is_complete and verdict is not Verdict.ROLLBACK:
                raise TransactionError(
                    f"not all messages of transaction {transaction_id} are stored: only roll it back"
                )
            place = f"{self.topics.half}[{number}]@{pending.offset}"
            self.write(Act(actor, VERBS[verdict], transaction_id, pending.group, place, why))
            stands, waits = self.apply(found, verdict, Author.OPERATOR, actor, timeout_s)
            if stands is verdict:
                return waits
        blocked = f"; it waits for {waits}" if waits else ""
        raise TransactionRefusedError(
            f"transaction {transaction_id}: its {verdict.name} was refused: {stands.name} was decided before{blocked}"
        )

    def apply(
        self, found: Found, verdict: Verdict, author: Author, actor: str, timeout_s: float
    ) -> tuple[Verdict, str]:
        """Store a decision, and wait up to `timeout_s` seconds until it has taken effect.

        Returns the decision that prevails (this or an earlier one) and what it waits for; empty if it is settled.
        Raises `DecisionNotStoredError` if it is not known to be stored.
        """
        pending, number = found.pending, found.half_partition
        place = (self.topics.done, number)
        done_from = self.bounds([place])[place][1]
        self._store_op(Op(pending.transaction_id, verdict, author, pending.group, number, pending.offsets, 0, actor))
        end = ask_again(lambda: end_of(self, pending.transaction_id, number, done_from), timeout_s, _SETTLED_POLL_S)
        if end is not None:
            return end, ""
        current = self.find(pending.transaction_id)
        if current is None or current.pending.verdict is None:
            return verdict, "a coordinator"
        return current.pending.verdict, current.shown.waits_for or "a coordinator"

    def end_of(self, transaction_id: str) -> Verdict | None:
        """Return the end of a transaction, if the done log still has it."""
        ends = (end_of(self, transaction_id, number) for number in range(self.topics.partitions))
        return next((end for end in ends if end is not None), None)

    def _may_follow(self, found: Found, verdict: Verdict) -> bool:
        """Return whether a decision may count after an earlier one; the coordinator judges it.

        A committed message that is not due can be rolled back; a message that its target refuses can be discarded.
        """
        pending = found.pending
        if pending.verdict is not Verdict.COMMIT:
            return False
        if verdict is Verdict.ROLLBACK:
            return pending.half.deliver_at_ms is not None
        return verdict is Verdict.DISCARD and bool(target_text(pending.topics, self._statuses))

    def resume(self, transaction_id: str, actor: str, why: str = "", *, again: bool = False) -> int:
        """Resume a discarded transaction; see `Administration.resume`.

        Its audit record is the claim: each place of the discarded topic is resumed once.
        """
        if again and self.find(transaction_id) is not None:
            raise TransactionError(
                f"transaction {transaction_id} is pending: there is nothing to bring back; see what it waits for with "
                "`penstock tx show`"
            )
        topics = self.topics
        # Before the claim: after it, a half that could not be stored would count as resumed.
        needed = [
            topic_right(Operation.WRITE, topics.half),
            topic_right(Operation.READ, topics.audit),
            topic_right(Operation.WRITE, topics.audit),
        ]
        require_rights(self.admin, f"transaction {transaction_id} cannot be brought back", needed)
        halves = self.claim(transaction_id, actor, why, again=again, may_publish_to=topics.may_publish_to)
        first = halves[0]
        keys = (first.order_key, first.key, transaction_id.encode())
        to = topics.half_partition(next(key for key in keys if key is not None))
        producer = self.producer
        try:
            for half in halves:
                producer.store(topics.half, to, half.key, half.value, encode_half(half), limit_s=ANSWER_S)
        except (KafkaException, PenstockError) as error:
            raise PenstockError(
                f"a half of transaction {transaction_id} is not known to be stored: {error}; look with "
                "`penstock tx show`, and if it is not pending, resume it with --again"
            ) from error
        return len(halves)

    def _store_op(self, op: Op) -> None:
        try:
            key = op.transaction_id.encode()
            self.producer.store(self.topics.op, op.half_partition, key, encode_op(op), limit_s=ANSWER_S)
        except (KafkaException, PenstockError) as error:
            raise DecisionNotStoredError(
                f"the decision of transaction {op.transaction_id} is not known to be stored: {error}; "
                "try again: a second one harms nothing"
            ) from error
