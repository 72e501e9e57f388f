"""What the parts of one coordinator of a store in Kafka share: where the store is, and what they note in common."""

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
from penstock.transactions.stores.coordination import Counts
from penstock.transactions.wire.topics import StoreTopics


@dataclass(slots=True, eq=False)
class CoordinatorContext:
    """What the parts of one coordinator share. Each value guards itself; the parts do not replace one.

    Attributes:
        topics: the store's; the coordinator sets them when it starts, before it makes its parts.
        counts: what is counted since the start.
        clock: the broker's time, as records and marks tell it.
        ration: warnings that bad input or brokers could repeat without end.
        rights: what it lacks now.
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
        """Note that `what` was refused for want of a right, if the error says so; tell whether it does."""
        if is_missing_right(error):
            self.rights.refused(what, right)
        return is_missing_right(error)

    def note_unreadable(self, error: KafkaException | KafkaError, what: str, topic: str) -> bool:
        """Do what `lacks` does, where the group was asked about, or a topic was to be read."""
        is_group = concerns_a_group(error)
        return self.note_missing_right(
            error, what, group_right(self.topics.coordinators) if is_group else topic_right(Operation.READ, topic)
        )
