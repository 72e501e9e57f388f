"""The values a user of transactional messages meets: states, results, the half a check is asked about, counts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal, NamedTuple

from penstock.message import Headers

#: What a send waits for: until its decision is handed to the client, is stored, or its message is visible.
Wait = Literal["sent", "stored", "published"]
#: In which order messages of one key are published: that of their decisions, or that of their halves.
Order = Literal["commit", "half"]
#: Upper bounds of the histogram of finish times (birth to published), in seconds; the last bucket has none.
FINISH_BUCKETS_S = (0.005, 0.01, 0.02, 0.03, 0.06, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 60.0)


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
    key: bytes | None = field(repr=False)
    value: bytes | None = field(repr=False)
    headers: Headers = field(repr=False)
    transaction_id: str
    check_count: int


#: What becomes of a half whose checks are exhausted: to the discarded topic, published, rolled back, or asked of a
#: function, whose UNKNOWN means the discarded topic.
DiscardPolicy = Literal["topic", "commit", "rollback"] | Callable[[HalfMessage], TransactionState]


@dataclass(frozen=True, slots=True)
class PendingTransaction:
    """A transaction that is not settled, as an operator sees it.

    Attributes:
        topics: the topics of its messages, in the order of its parts.
        age_s: seconds since the birth of its first half, by the store's clock.
        check_count: checks answered UNKNOWN so far.
        decided: the decision that waits to take effect, or None.
        deliver_at_ms: when it is published, in milliseconds since the epoch; None: as soon as it is committed.
        held_by: id of the transaction of its group and key that it waits for, with `order="half"`.
        waits_for: what it waits for else, in words, as a producer to be asked; empty: for its decision.
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
    """What `TransactionalProducer.send` did. A named tuple, for it is quick to make.

    Attributes:
        state: the decision that was stored; UNKNOWN when it was left to a check. In a store in Kafka it does not say
            that no check or operator had decided before: only `wait="published"` does.
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
        failed: halves or decisions that are not known to be stored, and decisions that the store refused at once,
            because another one stands.
        checks: checks answered by this producer, whatever the answer.
        failed_checks: checks whose function raised or answered nonsense; they count as UNKNOWN.
        skipped_checks: requests not taken up because all check workers were busy; they are asked again.
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
        answered_checks: answers of checks that counted: UNKNOWN, or the decision.
        no_producer: checks that were due and reached nobody.
        groups: Kafka transactions committed; `committed / groups` is the mean group size.
        recoveries: times the Kafka producer was replaced for the end of a transaction was in doubt, or may come twice.
        lost: records of the half, op and done logs that somebody else deleted before they were done with; a log that
            was deleted and made again counts as one at least, for nobody knows how many they were.
        held_by_key: transactions that wait for an earlier one of their group and key, with `order="half"`.
        delayed: committed transactions that wait for their `deliver_at`.
        hung_checks: calls of a discard policy given up because they did not return in time.
        finish_times: transactions by seconds from birth to published: one count for each bound of `FINISH_BUCKETS_S`,
            and one above; empty where they are not measured.
        finish_seconds: the sum of those seconds.
        left_behind: threads that hang in a call of the Kafka client which never returned, and were abandoned.
        slow_call: the call of the Kafka client that publishing waits for, if it has not returned for long; else empty.
        slow_call_s: its age in seconds.
        missing_rights: what the coordinator was refused lately for want of a right, each with what gives it. Targets
            are not among it: what is for them is held.
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
