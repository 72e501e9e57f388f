"""The public values of transactional messages: states, results, halves for a check, statistics."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal, NamedTuple

from penstock.message import Headers

#: A send waits until its decision is handed to the client, until it is stored, or until its message is visible.
Wait = Literal["sent", "stored", "published"]
#: Messages of one key are published in the order of their decisions, or of their halves.
Order = Literal["commit", "half"]
#: Upper bounds of the histogram of finish times (birth to published), in seconds; the last bucket has none.
FINISH_BUCKETS_S = (0.005, 0.01, 0.02, 0.03, 0.06, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0)


class TransactionState(Enum):
    """The outcome of a local transaction, which decides about its half message."""

    #: Publish the message: the local transaction committed.
    COMMIT = "commit"
    #: Never publish it: the local transaction did not commit and never will.
    ROLLBACK = "rollback"
    #: Not known yet: check again later.
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True)
class HalfMessage:
    """An undecided half message, as a check sees it.

    Attributes:
        topic: its target topic.
        key: its key, or None.
        value: its value, or None for a tombstone.
        headers: its headers in wire order.
        transaction_id: the id that the local transaction wrote with its data.
        check_count: the number of earlier checks that were answered UNKNOWN.
    """

    topic: str
    key: bytes | None = field(repr=False)
    value: bytes | None = field(repr=False)
    headers: Headers = field(repr=False)
    transaction_id: str
    check_count: int


#: The policy for a half whose checks are exhausted: move it to the discarded topic, publish it, roll it back, or call
#: a function. If that returns UNKNOWN, the half moves to the discarded topic.
DiscardPolicy = Literal["topic", "commit", "rollback"] | Callable[[HalfMessage], TransactionState]


@dataclass(frozen=True, slots=True)
class PendingTransaction:
    """A transaction that is not settled, as an operator sees it.

    Attributes:
        topics: the topics of its messages, in the order of its parts.
        age_s: seconds since the birth of its first half, by the store's clock.
        check_count: checks answered UNKNOWN so far.
        decided: the decision that has not taken effect yet, or None.
        deliver_at_ms: its time to be published, in milliseconds since the epoch; None: at its commit.
        held_by: with `order="half"`, the id of the earlier transaction of its group and key that holds it.
        waits_for: in words, any other thing that it waits for, such as a producer for its check; empty: its decision.
    """

    transaction_id: str
    group: str
    topics: tuple[str, ...]
    age_s: float
    check_count: int
    decided: TransactionState | None = None
    deliver_at_ms: int | None = None
    held_by: str | None = None
    waits_for: str = ""


class TransactionResult(NamedTuple):
    """The result of a send. A named tuple, because that is fast to make.

    Attributes:
        state: the stored decision; UNKNOWN if a check decides. In a store in Kafka a check or an operator may have
            decided before: only `wait="published"` excludes that.
        topic: the target topic of the message.
    """

    transaction_id: str
    state: TransactionState
    topic: str


@dataclass(frozen=True, slots=True)
class ProducerStatistics:
    """Counts of one `TransactionalProducer` since its start.

    Attributes:
        in_flight: transactions that were sent or entered, and have not ended.
        committed: COMMIT decisions stored by this producer.
        rolled_back: ROLLBACK decisions stored by this producer.
        unknown: transactions left to a check.
        failed: halves or decisions that are not known to be stored, and decisions that the store refused at once
            because another one counts.
        checks: checks answered by this producer, whatever the answer.
        failed_checks: checks whose function raised, or returned no `TransactionState`; they count as UNKNOWN.
        skipped_checks: requests ignored because all check workers were busy; the coordinator asks again.
        hung_checks: checks given up because they did not return in time.
        lost_decisions: decisions sent with `wait="sent"` that are not known to be stored: a check settles them.
    """

    in_flight: int
    committed: int
    rolled_back: int
    unknown: int
    failed: int
    checks: int
    failed_checks: int
    skipped_checks: int
    hung_checks: int = 0
    lost_decisions: int = 0


@dataclass(frozen=True, slots=True)
class CoordinatorStatistics:
    """Counts of one `Coordinator` since its start, and its present state.

    Attributes:
        partitions: half partitions of this coordinator whose logs it has read to the end, so that `pending` counts
            them.
        pending: halves that are not settled.
        oldest_pending_age: seconds since the birth of the oldest pending half; 0 if there is none.
        held: committed transactions that cannot be published now, because their topic is missing or refuses them.
        committed: transactions published.
        rolled_back: transactions settled without a trace downstream.
        discarded: transactions moved to the discarded topic.
        refused: decisions refused: a second one, an unknown or long settled id, a wrong group.
        forged: records of the half and op topics that cannot be genuine.
        checks: check requests sent.
        answered_checks: answers of checks that counted: UNKNOWN, or the decision.
        no_producer: due checks that reached no producer.
        groups: Kafka transactions committed; `committed / groups` is the mean group size.
        recoveries: replacements of the Kafka producer because the end of a transaction was in doubt, or may come twice.
        lost: records of the half, op and done logs that were deleted by others too early. A log that was deleted and
            created again counts as at least one, because the number is unknown.
        held_by_key: transactions that wait for an earlier one of their group and key, with `order="half"`.
        delayed: committed transactions that wait for their `deliver_at`.
        hung_checks: calls of a discard policy given up because they did not return in time.
        finish_times: counts of transactions by seconds from birth to published: one for each bound of
            `FINISH_BUCKETS_S`, and one above; empty if they are not measured.
        finish_seconds: the sum of those seconds.
        left_behind: abandoned threads that hang in a call of the Kafka client.
        slow_call: the call of the Kafka client that publishing has waited for too long; empty if there is none.
        slow_call_s: the age of this call in seconds.
        missing_rights: permissions that were lately missing, each with the command that grants it. Permissions on
            target topics are not included: their transactions count as held.
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
    lost: int = 0
    held_by_key: int = 0
    delayed: int = 0
    hung_checks: int = 0
    finish_times: tuple[int, ...] = ()
    finish_seconds: float = 0.0
    left_behind: int = 0
    slow_call: str = ""
    slow_call_s: float = 0.0
    missing_rights: tuple[str, ...] = ()
