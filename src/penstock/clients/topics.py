"""Questions about topics (partitions, ids, offsets, settings), and creation of missing ones.

A topic that was deleted and created again under its name has another id. Asked by name, brokers tell why a topic is not
visible: it does not exist, or this client lacks the permission. For readers of committed messages a log ends at the
oldest open transaction, or after the last record.
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
#: Codes for a topic that does not exist or cannot exist.
_ABSENT = {KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError.TOPIC_EXCEPTION}
#: The id that brokers without topic ids return: 16 zero bytes in base 64.
_NO_ID = "A" * 22


def described(
    admin: AdminClient, topics: Iterable[str], timeout_s: float = _ANSWER_S
) -> tuple[dict[str, Any], dict[str, KafkaException]]:
    """Return the `TopicDescription` of each topic, and by name the error of each topic without one.

    Raises `KafkaException` if the client library refuses to ask.
    """
    names = sorted(set(topics))
    # Some invalid names end the process within the client library.
    none = {name: KafkaException(KafkaError(KafkaError.TOPIC_EXCEPTION)) for name in names if not is_topic_name(name)}
    names = [name for name in names if name not in none]
    if not names:
        return {}, none
    asked = admin.describe_topics(TopicCollection(names), include_authorized_operations=True, request_timeout=timeout_s)
    found, failed = all_answered(asked, timeout_s)
    return found, {**failed, **none}


def id_of(description: Any) -> str | None:
    """Return the id of a described topic, or None if the brokers have no topic ids."""
    text = str(description.topic_id)
    return None if text == _NO_ID else text


def may_only_be_seen(description: Any) -> bool:
    """Tell whether a described topic may be seen but not read. Some brokers list no permissions at all."""
    allowed = {operation.name for operation in description.authorized_operations or ()}
    return Operation.DESCRIBE.name in allowed and Operation.READ.name not in allowed


@dataclass(frozen=True, slots=True)
class TopicIds:
    """The brokers' answer about the existence of topics. A topic that was deleted and created again has another id."""

    #: Id of each topic that has one.
    ids: Mapping[str, str]
    #: Topics that do not exist.
    absent: frozenset[str] = frozenset()
    #: The reason for each topic without an answer.
    failures: Mapping[str, str] = field(default_factory=dict)
    #: Topics that this client may not read, as far as the brokers report it.
    unreadable: frozenset[str] = frozenset()


def ask_topic_ids(admin: AdminClient, topics: Iterable[str], timeout_s: float) -> TopicIds:
    """Return which topics exist; `KafkaException` if the client library refuses to ask."""
    found, failed = described(admin, topics, timeout_s)
    failures = {topic: reason(error) for topic, error in failed.items()}
    codes = {topic: code_of(error) or 0 for topic, error in failed.items()}
    # The reason why no broker answers is only in the client's log, which is served here.
    admin.poll(0)
    # Negative codes are the client's own errors: no broker has answered.
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

#: The known offsets, and the errors of the others.
Offsets = tuple[dict[Place, int], dict[Place, KafkaException]]


def ask_offsets(
    admin: AdminClient,
    specs: Mapping[Place, OffsetSpec],
    timeout_s: float,
    isolation: IsolationLevel = IsolationLevel.READ_COMMITTED,
) -> Offsets:
    """Return offsets of partitions for readers of that isolation, within `timeout_s` seconds.

    Raises `KafkaException` if the client library refuses to ask.
    """
    wanted = {TopicPartition(*place): spec for place, spec in specs.items()}
    asked = admin.list_offsets(wanted, isolation_level=isolation, request_timeout=timeout_s)
    found, failed = all_answered({(part.topic, part.partition): future for part, future in asked.items()}, timeout_s)
    known = {place: int(answer.offset) for place, answer in found.items() if answer.offset != OFFSET_INVALID}
    # While a partition has no leader, the client library (2.16, seen) may answer with an invalid offset. Taken for the
    # end of a log, it would mean that the log is empty.
    text = "the answer holds no offset: the partition may have no leader yet"
    invalid = KafkaException(KafkaError(KafkaError.LEADER_NOT_AVAILABLE, text))
    return known, failed | dict.fromkeys(found.keys() - known.keys(), invalid)


def known_offsets(
    admin: AdminClient,
    specs: Mapping[Place, OffsetSpec],
    timeout_s: float,
    isolation: IsolationLevel = IsolationLevel.READ_COMMITTED,
) -> dict[Place, int]:
    """Return offsets as `ask_offsets`; `KafkaException` if one is unknown: try again."""
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
    """Return begin and end of each partition, including open transactions; errors as `known_offsets`."""
    uncommitted = IsolationLevel.READ_UNCOMMITTED
    lows = known_offsets(admin, dict.fromkeys(places, FIRST), timeout_s, uncommitted)
    ends = log_ends(admin, places, timeout_s, uncommitted)
    return {place: (low, ends[place]) for place, low in lows.items()}


#: Seconds that the creation of a topic may take: longer than the client's own time-out.
_CREATE_S = 65.0

#: Least replication factor of a store's topics, if there are this many brokers.
_COPIES = 3


@dataclass(frozen=True, slots=True)
class TopicSpec:
    """A topic that penstock creates if it is missing."""

    #: Name of the topic.
    name: str
    #: Number of partitions.
    partitions: int
    #: Topic settings by Kafka's names.
    config: Mapping[str, str] = field(default_factory=dict)
    #: The remedy in the error if Kafka does not accept the name.
    rename: str = "give it another name (of the topics of a store: another prefix)"


def partition_counts(admin: AdminClient, timeout_s: float = CONNECT_TIMEOUT_S) -> dict[str, int]:
    """Return the number of partitions of every topic that the client may see.

    Raises `BrokerConnectionError` if no broker answers within `timeout_s` seconds, or at once if all refuse the client.
    """
    return _counts(_metadata(admin, timeout_s))


def _metadata(admin: AdminClient, timeout_s: float = CONNECT_TIMEOUT_S) -> ClusterMetadata:
    return first_answer(admin, timeout_s, lambda: admin.list_topics(timeout=timeout_s))


def _counts(metadata: ClusterMetadata) -> dict[str, int]:
    return {name: len(topic.partitions) for name, topic in metadata.topics.items() if topic.error is None}


def hidden_topics(admin: AdminClient, topics: Iterable[str], timeout_s: float = CONNECT_TIMEOUT_S) -> list[str]:
    """Return the topics that are hidden because this client has no permission on them.

    The list of all topics omits hidden and absent ones alike. Asked by name, brokers distinguish them.
    """
    return [name for name, error in described(admin, topics, timeout_s)[1].items() if is_missing_right(error)]


def require_topics(admin: AdminClient, topics: Iterable[str], *, to: Operation = Operation.READ) -> dict[str, int]:
    """Return the number of partitions of each named topic; errors as `partition_counts` and `require_seen`."""
    counts, wanted = partition_counts(admin), list(topics)
    # The list of all topics omits hidden and absent ones alike. Asked by name, brokers distinguish them.
    found, failed = described(admin, [name for name in wanted if name not in counts], CONNECT_TIMEOUT_S)
    require_seen(admin, failed, to)
    counts |= {name: len(topic.partitions) for name, topic in found.items()}
    return {name: counts[name] for name in wanted}


def require_seen(admin: AdminClient, failed: Mapping[str, KafkaException], to: Operation = Operation.READ) -> None:
    """Raise the error for topics without a description; `failed` has their errors by name, as `described` returns them.

    `MissingRightError` names all hidden topics and the permission `to` that this client lacks. `TopicNotFoundError`
    names all absent topics. `BrokerConnectionError`: no broker answered.
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

    A topic that exists stays unchanged. The replication factor is the client's `penstock.replication.factor`, or else
    the broker's default; for topics `of_store` on three brokers or more, at least 3. Returns when the new topics have
    leaders; of topics `of_store`, all.

    Raises:
        BrokerConnectionError: no broker answered, or a topic has no leader.
        MissingRightError: this client may not create a topic, or lacks an operation on it that `needs` names.
        ConfigurationError: Kafka does not accept the name of a topic.
        PenstockError: the broker refused to create a topic.
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
                # Two processes that start together both create it, and one is too late; or the topic was hidden at
                # first, and the permission to see it was given in between.
                if name not in found and (is_hidden or code_of(error) != KafkaError.TOPIC_ALREADY_EXISTS):
                    needed = needs.get(name, ()) if is_hidden else None
                    raise _not_created(admin, wanted[name], error, needed) from error
    counts |= await_leaders(admin, wanted if of_store else [spec.name for spec in missing])
    return {name: counts[name] for name in wanted}


def await_leaders(admin: AdminClient, topics: Iterable[str]) -> dict[str, int]:
    """Wait until the answering broker knows the topics and their leaders, and return their partitions.

    The controller alone acknowledges a creation. A consumer that subscribes earlier gets no partitions, and asks again
    only minutes later. Raises `BrokerConnectionError` if this takes too long, and `MissingRightError` for topics that
    this client may create but not see.
    """
    wanted = set(topics)

    def led() -> dict[str, int]:
        """Return the partitions of the topics, or raise while one of them has no leader."""
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
    """Return the brokers' default, or 3 if that is more and there are three brokers; -1 stands for the default."""
    if len(metadata.brokers) < _COPIES:
        return -1
    resource = ConfigResource(ResourceType.BROKER, str(metadata.orig_broker_id))
    try:
        asked = admin.describe_configs([resource], request_timeout=CONNECT_TIMEOUT_S)[resource]
        settings = answered(asked, CONNECT_TIMEOUT_S + LATE_S)
        return max(_COPIES, int(settings["default.replication.factor"].value))
    except (KafkaException, KeyError):  # this needs a permission that a client may lack
        return _COPIES


def single_copies(admin: AdminClient, topics: Iterable[str] | None = None) -> list[str]:
    """Return a warning for each topic with one copy on a cluster of three brokers or more; default: of all topics.

    Empty if `penstock.replication.factor` asks for one copy, or no broker answered.
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
    """Return the error of a topic that could not be created. `needed`: it is hidden, and its necessary operations."""
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
    """Return the effective settings of each topic, and by name the error of each topic without an answer."""
    resources = [ConfigResource(ResourceType.TOPIC, topic) for topic in topics]
    if not resources:
        return {}, {}
    asked = admin.describe_configs(resources, request_timeout=timeout_s)
    found, failed = all_answered({resource.name: future for resource, future in asked.items()}, timeout_s)
    for topic, error in failed.items():  # an app runs without this permission
        _log.info("the settings of topic %s are not known: %s", topic, reason(error))
    return {topic: {name: each.value for name, each in settings.items()} for topic, settings in found.items()}, failed
