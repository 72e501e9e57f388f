"""Topics: how many partitions they have, which they are, where their logs end, and the missing ones made.

A topic that was made again under an old name has another id. Asked by name, the brokers say why a topic cannot be seen:
that there is none, or that this client may not know. A log ends for readers of committed messages at the oldest open
transaction, or behind all records.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from confluent_kafka import OFFSET_INVALID, IsolationLevel, KafkaError, KafkaException, TopicCollection, TopicPartition
from confluent_kafka.admin import (  # type: ignore[attr-defined] # not in its __all__
    ClusterMetadata,
    ConfigResource,
    OffsetSpec,
    ResourceType,
)
from confluent_kafka.cimpl import NewTopic

from penstock.clients.answers import (
    CONNECT_TIMEOUT_S,
    LATE_S,
    all_answered,
    answered,
    asked_until_ready,
    first_answer,
)
from penstock.clients.factory import REPLICATION_FACTOR, AdminClient
from penstock.clients.kafka_errors import code_of, is_missing_right, reason
from penstock.clients.reading import Place
from penstock.clients.rights import MissingRightError, Operation, principal_of, topic_right
from penstock.errors import BrokerConnectionError, ConfigurationError, PenstockError, TopicNotFoundError
from penstock.outgoing import is_topic_name

_log = logging.getLogger("penstock.kafka")

#: Seconds that a broker may take to answer.
_ANSWER_S = 5.0
#: What is said of a topic that there is not, or cannot be.
_ABSENT = {KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError.TOPIC_EXCEPTION}
#: What a broker says that has no topic ids: 16 zero bytes in base 64.
_NO_ID = "A" * 22


def described(
    admin: AdminClient, topics: Iterable[str], timeout_s: float = _ANSWER_S
) -> tuple[dict[str, Any], dict[str, KafkaException]]:
    """Return the `TopicDescription` of each topic, and by name why the brokers say nothing of the others.

    `KafkaException` where the client library refuses to ask.
    """
    names = sorted(set(topics))
    # Some of these end the process within the client library.
    none = {name: KafkaException(KafkaError(KafkaError.TOPIC_EXCEPTION)) for name in names if not is_topic_name(name)}
    names = [name for name in names if name not in none]
    if not names:
        return {}, none
    asked = admin.describe_topics(TopicCollection(names), include_authorized_operations=True, request_timeout=timeout_s)
    found, failed = all_answered(asked, timeout_s)
    return found, {**failed, **none}


def id_of(description: Any) -> str | None:
    """Return the id of a described topic, or None from brokers that have no ids."""
    text = str(description.topic_id)
    return None if text == _NO_ID else text


def may_only_be_seen(description: Any) -> bool:
    """Tell whether a described topic may be seen and not read. Brokers that do not tell rights list none at all."""
    allowed = {operation.name for operation in description.authorized_operations or ()}
    return Operation.DESCRIBE.name in allowed and Operation.READ.name not in allowed


@dataclass(frozen=True, slots=True)
class TopicIds:
    """Which topics there are, as the brokers answered: a topic that was deleted and made again has another id."""

    #: Id of each topic that has one.
    ids: Mapping[str, str]
    #: Topics that do not exist.
    absent: frozenset[str] = frozenset()
    #: Why there is no answer on a topic.
    failures: Mapping[str, str] = field(default_factory=dict)
    #: Topics that this client may not read, as far as brokers say.
    unreadable: frozenset[str] = frozenset()


def ask_topic_ids(admin: AdminClient, topics: Iterable[str], timeout_s: float) -> TopicIds:
    """Return which topics there are; `KafkaException` where the client library refuses to ask."""
    found, failed = described(admin, topics, timeout_s)
    failures = {topic: reason(error) for topic, error in failed.items()}
    codes = {topic: code_of(error) or 0 for topic, error in failed.items()}
    # Why no broker answers stands in the client's log alone, which it hears of here.
    admin.poll(0)
    # Numbers below zero are the client's own errors: no broker has said anything.
    if found or any(code > 0 for code in codes.values()):
        admin.words.clear()
    elif (cause := admin.words.cause) is not None:
        failures = {topic: f"{why}; {cause}" for topic, why in failures.items()}
    return TopicIds(
        ids={topic: known for topic, each in found.items() if (known := id_of(each)) is not None},
        absent=frozenset(topic for topic, code in codes.items() if code == KafkaError.UNKNOWN_TOPIC_OR_PART),
        failures=failures,
        unreadable=frozenset(
            {topic for topic, error in failed.items() if is_missing_right(error)}
            | {topic for topic, each in found.items() if may_only_be_seen(each)}
        ),
    )


FIRST: OffsetSpec = OffsetSpec.earliest()  # type: ignore[no-untyped-call] # untyped in the library
LAST: OffsetSpec = OffsetSpec.latest()  # type: ignore[no-untyped-call] # untyped in the library

#: Offsets that are known, and why others are not.
Offsets = tuple[dict[Place, int], dict[Place, KafkaException]]


def ask_offsets(
    admin: AdminClient,
    specs: Mapping[Place, OffsetSpec],
    timeout_s: float,
    isolation: IsolationLevel = IsolationLevel.READ_COMMITTED,
) -> Offsets:
    """Return offsets of partitions, for readers of that isolation, waiting `timeout_s` seconds at most.

    `KafkaException` where the client library refuses to ask.
    """
    wanted = {TopicPartition(*place): spec for place, spec in specs.items()}
    asked = admin.list_offsets(wanted, isolation_level=isolation, request_timeout=timeout_s)
    found, failed = all_answered({(part.topic, part.partition): future for part, future in asked.items()}, timeout_s)
    known = {place: int(answer.offset) for place, answer in found.items() if answer.offset != OFFSET_INVALID}
    # Where a partition has no leader for a moment, the client library (2.16, seen) may answer so. Taken for the end of
    # a log, it would mean that all in it is gone.
    text = "the answer holds no offset: the partition may have no leader yet"
    invalid = KafkaException(KafkaError(KafkaError.LEADER_NOT_AVAILABLE, text))
    return known, failed | dict.fromkeys(found.keys() - known.keys(), invalid)


def known_offsets(
    admin: AdminClient,
    specs: Mapping[Place, OffsetSpec],
    timeout_s: float,
    isolation: IsolationLevel = IsolationLevel.READ_COMMITTED,
) -> dict[Place, int]:
    """Return offsets as `ask_offsets`; `KafkaException` where one is not known: try again."""
    found, failed = ask_offsets(admin, specs, timeout_s, isolation)
    for error in failed.values():
        raise error
    return found


def log_ends(
    admin: AdminClient,
    places: Sequence[Place],
    timeout_s: float,
    isolation: IsolationLevel = IsolationLevel.READ_COMMITTED,
) -> dict[Place, int]:
    """Return the end of each partition; errors as `known_offsets`."""
    return known_offsets(admin, dict.fromkeys(places, LAST), timeout_s, isolation)


def log_bounds(admin: AdminClient, places: Sequence[Place], timeout_s: float) -> dict[Place, tuple[int, int]]:
    """Return where each partition begins and ends, records of open transactions included; errors as `known_offsets`."""
    uncommitted = IsolationLevel.READ_UNCOMMITTED
    lows = known_offsets(admin, dict.fromkeys(places, FIRST), timeout_s, uncommitted)
    ends = log_ends(admin, places, timeout_s, uncommitted)
    return {place: (low, ends[place]) for place, low in lows.items()}


#: Seconds that the creation of a topic may take: longer than the client itself waits.
_CREATE_S = 65.0

#: Copies at least of what a store stands on, where there are so many brokers.
_COPIES = 3


@dataclass(frozen=True, slots=True)
class TopicSpec:
    """A topic as penstock wants it when it has to create it."""

    #: Name of the topic.
    name: str
    #: Number of partitions.
    partitions: int
    #: Topic settings by Kafka's names.
    config: Mapping[str, str] = field(default_factory=dict)
    #: What to do where Kafka does not take its name, for the error.
    rename: str = "give it another name (of the topics of a store: another prefix)"


def partition_counts(admin: AdminClient, timeout_s: float = CONNECT_TIMEOUT_S) -> dict[str, int]:
    """Return the number of partitions of every topic the client may see.

    `BrokerConnectionError` where no broker answered within `timeout_s` seconds, at once where none lets the client in.
    """
    return _counts(_metadata(admin, timeout_s))


def _metadata(admin: AdminClient, timeout_s: float = CONNECT_TIMEOUT_S) -> ClusterMetadata:
    return first_answer(admin, timeout_s, lambda: admin.list_topics(timeout=timeout_s))


def _counts(metadata: ClusterMetadata) -> dict[str, int]:
    return {name: len(topic.partitions) for name, topic in metadata.topics.items() if topic.error is None}


def hidden_topics(admin: AdminClient, topics: Iterable[str], timeout_s: float = CONNECT_TIMEOUT_S) -> list[str]:
    """Return those topics that the brokers say nothing of because this client has no right on them.

    The list of all topics leaves out both them and what does not exist; asked by name, the brokers distinguish them.
    """
    return [name for name, error in described(admin, topics, timeout_s)[1].items() if is_missing_right(error)]


def require_topics(admin: AdminClient, topics: Iterable[str], *, to: Operation = Operation.READ) -> dict[str, int]:
    """Return the number of partitions of each named topic; raises as `require_seen`, too."""
    counts, wanted = partition_counts(admin), list(topics)
    # What is hidden is not in the list of all topics. Asked by name, brokers distinguish it from what does not exist.
    found, failed = described(admin, [name for name in wanted if name not in counts], CONNECT_TIMEOUT_S)
    require_seen(admin, failed, to)
    counts |= {name: len(topic.partitions) for name, topic in found.items()}
    return {name: counts[name] for name in wanted}


def require_seen(admin: AdminClient, failed: Mapping[str, KafkaException], to: Operation = Operation.READ) -> None:
    """Raise where brokers say nothing of topics: `failed` has why, by name, as `described` returns it.

    `MissingRightError` names all that cannot be seen, and says that this client lacks the permission `to` them;
    `TopicNotFoundError` names all that do not exist; `BrokerConnectionError` where no broker answered.
    """
    if hidden := sorted(name for name, error in failed.items() if is_missing_right(error)):
        raise MissingRightError(
            f"topic{'s' if len(hidden) > 1 else ''} {', '.join(hidden)} cannot be seen at {admin.servers}",
            [topic_right(to, name) for name in hidden],
            principal_of(admin.config),
        )
    if missing := ", ".join(sorted(failed)):
        if silent := [error for error in failed.values() if code_of(error) not in _ABSENT]:
            text = f"the brokers at {admin.servers} do not say whether there is {missing}"
            raise BrokerConnectionError(f"{text}: {reason(silent[0])}; see whether all of them are up, and start again")
        raise TopicNotFoundError(f"no such topic at {admin.servers}: {missing}; create it first, or correct the name")


def ensure_topics(
    admin: AdminClient,
    specs: Iterable[TopicSpec],
    *,
    needs: Mapping[str, Sequence[Operation]] = MappingProxyType({}),
    of_store: bool = False,
) -> dict[str, int]:
    """Create the topics that do not exist and return the number of partitions of each.

    A topic that exists is left as it is. The replication factor is the client's `penstock.replication.factor`, else the
    broker's default; where they are `of_store` and there are three brokers or more, at least 3. Returns once the new
    ones have leaders, and all that are `of_store`.

    `BrokerConnectionError` where no broker answered, or one has no leader; `MissingRightError` where this client may
    not create one, or lacks what it is needed for, by name in `needs`; `ConfigurationError` where Kafka does not take
    the name of one; `PenstockError` where the broker refused to create one.
    """
    wanted = {spec.name: spec for spec in specs}
    metadata = _metadata(admin)
    counts = _counts(metadata)
    missing = [spec for name, spec in wanted.items() if name not in counts]
    if missing:
        factor = admin.replication_factor or (_factor_of_store(admin, metadata) if of_store else -1)
        new = [
            NewTopic(spec.name, num_partitions=spec.partitions, replication_factor=factor, config=dict(spec.config))
            for spec in missing
        ]
        for name, future in admin.create_topics(new).items():
            try:
                answered(future, _CREATE_S)
            except KafkaException as error:
                found, failed = described(admin, [name], CONNECT_TIMEOUT_S)
                is_hidden = name in failed and is_missing_right(failed[name])
                # Two processes that start together both create, and one comes too late; or the topic was hidden at
                # first, and the right to see it was given in between.
                if name not in found and (is_hidden or code_of(error) != KafkaError.TOPIC_ALREADY_EXISTS):
                    needed = needs.get(name, ()) if is_hidden else None
                    raise _not_created(admin, wanted[name], error, needed) from error
    counts |= await_leaders(admin, wanted if of_store else [spec.name for spec in missing])
    return {name: counts[name] for name in wanted}


def await_leaders(admin: AdminClient, topics: Iterable[str]) -> dict[str, int]:
    """Wait until the broker that answers knows of the topics and their leaders, and return their partitions.

    Creation is acknowledged by the controller alone. A consumer that subscribes earlier gets no partitions, and asks
    again only minutes later. `BrokerConnectionError` names them where that takes too long, `MissingRightError` those
    that this client may create and not see.
    """
    wanted = set(topics)

    def led() -> dict[str, int]:
        """Return the partitions of the topics, or raise as long as one of them has no leader."""
        known = admin.list_topics(timeout=CONNECT_TIMEOUT_S).topics
        _, unseen = described(admin, wanted - known.keys(), CONNECT_TIMEOUT_S)
        require_seen(admin, {name: why for name, why in unseen.items() if is_missing_right(why)}, Operation.DESCRIBE)
        counts = {
            name: len(known[name].partitions)
            for name in wanted & known.keys()
            if known[name].partitions
            and all(partition.leader >= 0 and partition.error is None for partition in known[name].partitions.values())
        }
        if missing := sorted(wanted - counts.keys()):
            text = f"{', '.join(missing)} has no leader, or is not known"
            raise KafkaException(KafkaError(KafkaError.LEADER_NOT_AVAILABLE, text))
        return counts

    try:
        return asked_until_ready(led, CONNECT_TIMEOUT_S) if wanted else {}
    except KafkaException as error:
        raise BrokerConnectionError(
            f"{', '.join(sorted(wanted))} at {admin.servers} had no leader for {CONNECT_TIMEOUT_S:g} s: "
            f"{reason(error)}; check that all brokers run"
        ) from error


def _factor_of_store(admin: AdminClient, metadata: ClusterMetadata) -> int:
    """Return the brokers' default, or 3 where that is more and there are three; -1 stands for the default."""
    if len(metadata.brokers) < _COPIES:
        return -1
    resource = ConfigResource(ResourceType.BROKER, str(metadata.orig_broker_id))
    try:
        asked = admin.describe_configs([resource], request_timeout=CONNECT_TIMEOUT_S)[resource]
        settings = answered(asked, CONNECT_TIMEOUT_S + LATE_S)
        return max(_COPIES, int(settings["default.replication.factor"].value))
    except (KafkaException, KeyError):  # it takes a right that a client need not have
        return _COPIES


def single_copies(admin: AdminClient, topics: Iterable[str] | None = None) -> list[str]:
    """Return a sentence for each of these topics, or of all, that has one copy on a cluster of three brokers or more.

    None where that is wanted, by `penstock.replication.factor`, or no broker answered.
    """
    try:
        metadata = admin.list_topics(timeout=CONNECT_TIMEOUT_S)
    except KafkaException:
        return []
    if len(metadata.brokers) < _COPIES or admin.replication_factor == 1:
        return []
    names = metadata.topics.keys() if topics is None else metadata.topics.keys() & set(topics)
    return [
        f"topic {name} has replication factor 1 on a cluster of {len(metadata.brokers)} brokers: while the broker that "
        "has it is down nothing reads or writes it, and with that disk it is lost; give it more copies by "
        f"kafka-reassign-partitions.sh, and set config[{REPLICATION_FACTOR!r}] for topics that penstock creates"
        for name in sorted(names)
        if any(len(partition.replicas) == 1 for partition in metadata.topics[name].partitions.values())
    ]


def _not_created(
    admin: AdminClient, spec: TopicSpec, error: KafkaException, needed: Sequence[Operation] | None
) -> PenstockError:
    """Return the error of a topic that could not be created, or is there and hidden; then it is `needed` for these."""
    name, principal = spec.name, principal_of(admin.config)
    create = topic_right(Operation.CREATE, name)
    if needed is not None:
        rights = [topic_right(operation, name) for operation in needed]
        what = f"topic {name} cannot be seen, nor created where it does not exist"
        return MissingRightError(what, rights or [topic_right(Operation.WRITE, name), create], principal)
    if is_missing_right(error):
        what = f"topic {name} is missing and could not be created (somebody who may can create it by hand, too)"
        return MissingRightError(what, [create], principal)
    if code_of(error) == KafkaError.TOPIC_EXCEPTION:
        return ConfigurationError(f"Kafka does not take the name of topic {name!r}: {reason(error)}; {spec.rename}")
    return PenstockError(
        f"topic {name} is missing and could not be created: {reason(error)}; "
        "create it by hand or allow this client to create topics"
    )


def topic_settings(
    admin: AdminClient, topics: Iterable[str], timeout_s: float = CONNECT_TIMEOUT_S
) -> tuple[dict[str, dict[str, str | None]], dict[str, KafkaException]]:
    """Return the settings of each topic as the brokers apply them, and by name why those of others are not known."""
    resources = [ConfigResource(ResourceType.TOPIC, topic) for topic in topics]
    if not resources:
        return {}, {}
    asked = admin.describe_configs(resources, request_timeout=timeout_s)
    found, failed = all_answered({resource.name: future for resource, future in asked.items()}, timeout_s)
    for topic, error in failed.items():  # no right to ask is no reason not to run
        _log.info("the settings of topic %s are not known: %s", topic, reason(error))
    return {topic: {name: each.value for name, each in settings.items()} for topic, settings in found.items()}, failed
