"""The context of one coordinator of a store in Kafka: settings, counts, clock and missing permissions."""

from __future__ import annotations

from dataclasses import dataclass, field

from confluent_kafka import KafkaError, KafkaException

from penstock.clients.bounded_calls import LeftBehind
from penstock.clients.kafka_errors import concerns_a_group, is_missing_right
from penstock.clients.rights import Operation, Right, group_right, topic_right
from penstock.clients.transactional.missing_rights import MissingRights
from penstock.options import ClientConfig
from penstock.transactions.core.check_plan import CheckPolicy
from penstock.transactions.core.clock import BrokerClock
from penstock.transactions.rationed_log import RationedLog
from penstock.transactions.stores.store_coordinator import Counts
from penstock.transactions.wire.topics import StoreTopics


@dataclass(slots=True, eq=False)
class CoordinatorContext:
    """Shared by the parts of one coordinator. Each value is thread-safe by itself; no part replaces a value.

    Attributes:
        topics: the store's topics. The coordinator sets them at its start, before it makes its parts.
        counts: the counts since the start.
        clock: the broker's time, learnt from records and marks.
        ration: rate-limited warnings, for causes that bad input or brokers could repeat without end.
        rights: the permissions missing now.
        left: threads that hang in calls of the Kafka client.
    """

    bootstrap_servers: str
    config: ClientConfig = field(repr=False)
    policy: CheckPolicy
    topics: StoreTopics
    counts: Counts = field(default_factory=Counts)
    clock: BrokerClock = field(default_factory=BrokerClock)
    ration: RationedLog = field(default_factory=RationedLog)
    rights: MissingRights = field(init=False)
    left: LeftBehind = field(init=False)

    def __post_init__(self) -> None:
        self.rights = MissingRights(self.config)
        self.left = LeftBehind(f"the coordinator of {self.topics.prefix}")

    def note_missing_right(self, error: KafkaException | KafkaError, what: str, right: Right) -> bool:
        """If the error is a missing permission, note that `what` needs `right`; return whether it is."""
        if is_missing_right(error):
            self.rights.refused(what, right)
        return is_missing_right(error)

    def note_unreadable(self, error: KafkaException | KafkaError, what: str, topic: str) -> bool:
        """Do the same for a request about the coordinators' group, or for reading a topic."""
        is_group = concerns_a_group(error)
        return self.note_missing_right(
            error, what, group_right(self.topics.coordinators) if is_group else topic_right(Operation.READ, topic)
        )
