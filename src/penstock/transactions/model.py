"""The values a user of transactional messages meets: states, results, the half a check is asked about, counts."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from penstock.message import Headers


class TransactionState(Enum):
    """What becomes of a half message."""

    #: Publish it: the local transaction committed.
    COMMIT = "commit"
    #: Never publish it: the local transaction did not commit and never will.
    ROLLBACK = "rollback"
    #: Not known yet: ask again later.
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class HalfMessage:
    """An undecided half message, as a check sees it.

    Attributes:
        topic: the topic it is to be published to.
        key: its key, or None.
        value: its value, or None for a tombstone.
        headers: its headers in wire order.
        transaction_id: the id under which the local transaction knows it.
        check_count: how many checks were answered UNKNOWN before this one.
    """

    topic: str
    key: bytes | None
    value: bytes | None
    headers: Headers
    transaction_id: str
    check_count: int


@dataclass(frozen=True, slots=True)
class TransactionResult:
    """What `TransactionalProducer.send` did.

    Attributes:
        transaction_id: the id of the transaction.
        state: the decision that was stored; UNKNOWN when it was left to a check.
        topic: the topic the message is published to when it commits.
    """

    transaction_id: str
    state: TransactionState
    topic: str


@dataclass(frozen=True, slots=True)
class ProducerStatistics:
    """Counts of one `TransactionalProducer` since its start.

    Attributes:
        in_flight: transactions entered and not yet left.
        committed: COMMIT decisions stored by this producer.
        rolled_back: ROLLBACK decisions stored by this producer.
        unknown: transactions left to a check.
        failed: halves or decisions that are not known to be stored.
        checks: checks answered by this producer, whatever the answer.
        failed_checks: checks whose function raised or answered nonsense; they count as UNKNOWN.
        skipped_checks: requests not taken up because all check workers were busy; they are asked again.
    """

    in_flight: int
    committed: int
    rolled_back: int
    unknown: int
    failed: int
    checks: int
    failed_checks: int
    skipped_checks: int


@dataclass(frozen=True, slots=True)
class CoordinatorStatistics:
    """Counts of one `Coordinator` since its start, and what it holds now.

    Attributes:
        partitions: half partitions this coordinator owns and has taken over wholly: all that was in their logs then
            is read, so that `pending` tells of it.
        pending: halves not yet settled.
        oldest_pending_age: seconds since the birth of the oldest of them; 0 when there is none.
        held: committed transactions that cannot be published now, because their topic is missing or refuses them.
        committed: transactions published.
        rolled_back: transactions settled without a trace downstream.
        discarded: transactions moved to the discarded topic.
        refused: decisions refused: a second one, an unknown or long settled id, a wrong group.
        forged: records of the half and op topics that could not be what they claim to be.
        checks: check requests sent.
        answered_checks: checks answered UNKNOWN.
        no_producer: checks that were due and reached nobody.
        groups: Kafka transactions committed; `committed / groups` is the mean group size.
        recoveries: times the Kafka producer was replaced because the end of a transaction was in doubt.
    """

    partitions: int
    pending: int
    oldest_pending_age: float
    held: int
    committed: int
    rolled_back: int
    discarded: int
    refused: int
    forged: int
    checks: int
    answered_checks: int
    no_producer: int
    groups: int
    recoveries: int


__all__ = [
    "CoordinatorStatistics",
    "HalfMessage",
    "ProducerStatistics",
    "TransactionResult",
    "TransactionState",
]
