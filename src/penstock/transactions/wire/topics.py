"""The topics of the half/op store: names, settings, and the half partition of a message."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from math import gcd

from xxhash import xxh3_64_intdigest

from penstock.clients.factory import AdminClient
from penstock.clients.rights import (
    Operation,
    Resource,
    Right,
    group_right,
    topic_right,
    transactional_right,
)
from penstock.clients.topics import TopicSpec, ensure_topics
from penstock.errors import ConfigurationError

#: Partitions of half, op and done if penstock creates them: as many coordinators can share the work. More of them cost
#: throughput, because each needs its own requests and transaction markers.
DEFAULT_PARTITIONS = 2
#: Partitions of the check topic: as many producers of a group can share its checks.
CHECK_PARTITIONS = 8

#: Kafka's own topics: a half that names one of them as its target is forged.
_INTERNAL = frozenset({"__consumer_offsets", "__transaction_state", "__share_group_state"})

#: The store itself deletes below its checkpoints: no pending half may be lost to retention.
KEPT = {"cleanup.policy": "delete", "retention.ms": "-1", "retention.bytes": "-1"}
#: Deleted records free disk space only with their whole segment. Kafka's default segments have a gigabyte.
_SEGMENTS = {"segment.bytes": str(16 << 20)}
#: The birth of a half is its append time by the broker's clock: producers' clocks do not count.
BROKER_TIME = {"message.timestamp.type": "LogAppendTime"}
#: A check request and a discarded record are halves with a few more headers, and the done log may hold snapshots of
#: halves. So everything that fits as a half must fit here.
ROOM = {"max.message.bytes": str(2 << 20)}
#: Most characters of a topic's name.
_MAX_TOPIC_NAME = 249
#: The last parts of the topics' names.
_PARTS = ("half", "op", "done", "check", "discarded", "audit", "status")
_PREFIX = re.compile(r"[a-zA-Z0-9._-]+")
_ONE_HOUR_MS = str(60 * 60 * 1000)
_LOG_NEEDS = (Operation.READ, Operation.WRITE, Operation.DELETE, Operation.DESCRIBE_CONFIGS)
#: The operations of a coordinator on the topics of its store, by the last part of their names.
COORDINATOR_NEEDS: Mapping[str, Sequence[Operation]] = {
    "half": (Operation.READ, Operation.DELETE, Operation.DESCRIBE_CONFIGS),
    "op": _LOG_NEEDS,
    "done": _LOG_NEEDS,
    "check": (Operation.WRITE,),
    "discarded": (Operation.READ, Operation.WRITE),
    "status": (Operation.WRITE,),
}
#: Only the newest status counts. Short segments keep no more than about an hour of them.
_STATUS = {"retention.ms": _ONE_HOUR_MS, "segment.ms": str(10 * 60 * 1000)}


@dataclass(frozen=True, slots=True)
class StoreTopics:
    """The topics of one store.

    Attributes:
        partitions: of half, op and done.
        half: name of the topic of prepared messages.
        op: the topic of decisions.
        done: the topic of completions.
        check: the topic of check requests to producer groups.
        discarded: the topic of discarded messages. It may have fewer partitions than half, op and done.
        audit: the topic of operators' decisions.
        status: the topic in which coordinators report their obstacles.
        coordinators: name of the consumer group in which coordinators share the half partitions.
        all: names of all topics of the store.
    """

    prefix: str
    partitions: int = DEFAULT_PARTITIONS
    check_partitions: int = CHECK_PARTITIONS
    discarded_partitions: int = 1
    half: str = field(init=False)
    op: str = field(init=False)
    done: str = field(init=False)
    check: str = field(init=False)
    discarded: str = field(init=False)
    audit: str = field(init=False)
    status: str = field(init=False)
    coordinators: str = field(init=False)
    all: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        names = {part: f"{self.prefix}.{part}" for part in _PARTS}
        for part, name in names.items():
            object.__setattr__(self, part, name)
        object.__setattr__(self, "coordinators", f"{self.prefix}.coordinator")
        object.__setattr__(self, "all", frozenset(names.values()))

    def checkers(self, group: str) -> str:
        """Return the consumer group in which the producers of a group share its checks."""
        return f"{self.prefix}.check.{group}"

    def coordinator_rights(self, existing: Collection[str] = ()) -> list[Right]:
        """Return the rights of a coordinator, except Write on targets. Create is for topics not `existing`."""
        operations = {f"{self.prefix}.{name}": needed for name, needed in COORDINATOR_NEEDS.items()}
        return [
            *(topic_right(operation, topic) for topic, needed in operations.items() for operation in needed),
            *(topic_right(Operation.CREATE, topic) for topic in operations if topic not in existing),
            group_right(self.coordinators),
            Right(Operation.DESCRIBE, Resource.GROUP, self.checkers(""), is_prefix=True),
            transactional_right(f"{self.coordinators}."),
        ]

    def may_publish_to(self, topic: str) -> bool:
        """Tell whether a message may name `topic` as its target: not the store itself, not Kafka's own topics."""
        if not topic.startswith((f"{self.prefix}.", "__")):
            return True
        return topic not in _INTERNAL and topic not in self.all

    def half_partition(self, ordering_key: bytes) -> int:
        """Return the half partition of an ordering key: the same in every process, independent of Kafka's hash."""
        return xxh3_64_intdigest(ordering_key) % self.partitions

    def trial_place(self, number: int) -> tuple[str, int]:
        """Return the place whose position shows an open trial of a half partition. No other use moves that position."""
        return self.discarded, number % self.discarded_partitions

    def check_partition(self, transaction_id: str, attempt: int) -> int:
        """Return the check partition of an attempt. Successive attempts use all partitions in turn.

        Neighbouring partitions mostly belong to one producer, so the step is about half of their number.
        """
        count = self.check_partitions
        step = next(step for step in range(count // 2 + 1, 2 * count) if gcd(step, count) == 1)
        return (xxh3_64_intdigest(transaction_id.encode()) + attempt * step) % count


def require_prefix(prefix: object, longest: str = ".discarded") -> None:
    """Raise `ConfigurationError` unless a prefix is valid. `longest` is the longest suffix of a name with it."""
    if not isinstance(prefix, str) or _PREFIX.fullmatch(prefix) is None:
        raise ConfigurationError(f"prefix must be a name made of letters, digits, '.', '_' and '-', but is {prefix!r}")
    most = _MAX_TOPIC_NAME - len(longest)
    if len(prefix) > most:
        raise ConfigurationError(
            f"prefix must have at most {most} characters, so that the store's topics have names that Kafka takes, but "
            f"has {len(prefix)}"
        )


def open_topics(
    admin: AdminClient,
    prefix: str,
    partitions: int,
    *,
    needs: Mapping[str, Sequence[Operation]] = COORDINATOR_NEEDS,
) -> StoreTopics:
    """Create the absent topics of a store. Return its topics with their real partition counts.

    `needs` has the topics, by the last part of their names, with this client's operations on them. If a topic is
    hidden, the error names the missing right. Raises `ConfigurationError` if the prefix is no topic name, and as
    `log_partitions`; otherwise as `ensure_topics`.
    """
    require_prefix(prefix)
    topics = StoreTopics(prefix, partitions)
    named = {f"{prefix}.{name}": operations for name, operations in needs.items()}
    specs = [
        TopicSpec(topics.half, partitions, KEPT | _SEGMENTS | BROKER_TIME),
        TopicSpec(topics.op, partitions, KEPT | _SEGMENTS | BROKER_TIME),
        TopicSpec(topics.done, partitions, KEPT | _SEGMENTS | ROOM),
        TopicSpec(topics.check, CHECK_PARTITIONS, {"retention.ms": _ONE_HOUR_MS, **ROOM}),
        TopicSpec(topics.discarded, partitions, {**KEPT, **ROOM}),
        TopicSpec(topics.status, 1, _STATUS | _SEGMENTS | BROKER_TIME),
    ]
    counts = ensure_topics(admin, [spec for spec in specs if spec.name in named], needs=named, of_store=True)
    return StoreTopics(prefix, log_partitions(topics, counts), counts[topics.check], counts[topics.discarded])


def log_partitions(topics: StoreTopics, counts: Mapping[str, int]) -> int:
    """Return the partition count of half, op and done. Raises `ConfigurationError` if their counts differ."""
    logs = [counts[topics.half], counts[topics.op], counts[topics.done]]
    if len(set(logs)) != 1:
        raise ConfigurationError(
            f"{topics.half}, {topics.op} and {topics.done} must have the same number of partitions, but have "
            f"{logs[0]}, {logs[1]} and {logs[2]}; give all of them {max(logs)}, by `kafka-topics.sh --alter --topic "
            f"NAME --partitions {max(logs)}`, or use another prefix"
        )
    return logs[0]
