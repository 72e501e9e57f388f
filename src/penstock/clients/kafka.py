"""What the engines share of Kafka: is a broker there, do topics exist, make the missing ones; how to fetch many.

Nothing here keeps a connection.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TypeVar

from confluent_kafka import OFFSET_INVALID, KafkaError, KafkaException, TopicCollection
from confluent_kafka.admin import (  # type: ignore[attr-defined] # not in its __all__
    AdminClient,
    ConfigResource,
    ListOffsetsResultInfo,
    ResourceType,
)
from confluent_kafka.cimpl import NewTopic

from penstock.clients import admin as admin_client
from penstock.clients.reaching import first_answer, not_answered
from penstock.clients.rights import THIS_CLIENT, MissingRightError, Operation, is_missing_right, topic_right
from penstock.errors import PenstockError, TopicNotFoundError

#: Seconds a broker may take to answer before it counts as unreachable.
CONNECT_TIMEOUT_S = 15.0
#: Seconds that one look at the metadata may take, and between two looks.
_METADATA_LOOK_S = 5.0
_LOOK_S = 0.02

#: What passes by itself: a leader moves, a broker starts or is away for a moment, metadata has not come round yet, an
#: answer took too long. `KafkaError.retriable()` is false for all of them outside of a transactional producer.
_TRANSIENT = frozenset(
    {
        KafkaError._ALL_BROKERS_DOWN,  # noqa: SLF001 - the client library's public constants look so, here and below
        KafkaError._DESTROY_BROKER,  # noqa: SLF001 - the same
        KafkaError._RESOLVE,  # noqa: SLF001 - the same
        KafkaError._TIMED_OUT,  # noqa: SLF001 - the same
        KafkaError._TIMED_OUT_QUEUE,  # noqa: SLF001 - the same
        KafkaError._TRANSPORT,  # noqa: SLF001 - the same
        KafkaError._UNKNOWN_PARTITION,  # noqa: SLF001 - the same
        KafkaError._UNKNOWN_TOPIC,  # noqa: SLF001 - the same
        KafkaError._WAIT_CACHE,  # noqa: SLF001 - the same
        KafkaError._WAIT_COORD,  # noqa: SLF001 - the same
        KafkaError.BROKER_NOT_AVAILABLE,
        KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
        KafkaError.COORDINATOR_NOT_AVAILABLE,
        KafkaError.FENCED_LEADER_EPOCH,
        KafkaError.KAFKA_STORAGE_ERROR,
        KafkaError.LEADER_NOT_AVAILABLE,
        KafkaError.NETWORK_EXCEPTION,
        KafkaError.NOT_CONTROLLER,
        KafkaError.NOT_COORDINATOR,
        KafkaError.NOT_LEADER_FOR_PARTITION,
        KafkaError.OFFSET_NOT_AVAILABLE,
        KafkaError.REPLICA_NOT_AVAILABLE,
        KafkaError.REQUEST_TIMED_OUT,
        KafkaError.UNKNOWN_LEADER_EPOCH,
        KafkaError.UNKNOWN_TOPIC_ID,
        KafkaError.UNKNOWN_TOPIC_OR_PART,
    }
)

_log = logging.getLogger("penstock.kafka")

AnswerT = TypeVar("AnswerT")


@dataclass(frozen=True, slots=True)
class TopicSpec:
    """A topic as penstock wants it when it has to create it."""

    #: Name of the topic.
    name: str
    #: Number of partitions.
    partitions: int
    #: Topic settings by Kafka's names.
    config: Mapping[str, str] = field(default_factory=dict)
    #: Whether it can be done without, where the broker refuses to create it.
    is_optional: bool = False


def reason(error: KafkaException | KafkaError) -> str:
    """Return the text of a Kafka error without the client library's wrapping."""
    inner = error.args[0] if isinstance(error, KafkaException) and error.args else error
    return f"{inner.str()} ({inner.name()})" if isinstance(inner, KafkaError) else str(inner)


def told_offset(answer: ListOffsetsResultInfo) -> int:
    """Return the offset in an answer of `AdminClient.list_offsets`; `KafkaException` where none was told: try again.

    Where a partition has no leader for a moment, the client library (2.16, seen) may answer with an invalid offset.
    Taken for the end of a log, it would mean that all in it is gone.
    """
    if answer.offset == OFFSET_INVALID:
        raise KafkaException(
            KafkaError(KafkaError.LEADER_NOT_AVAILABLE, "no offset was told: the partition may have no leader yet")
        )
    return int(answer.offset)


def answered(question: Future[AnswerT], timeout_s: float) -> AnswerT:
    """Return what brokers answered to a question of an admin client, waiting `timeout_s` seconds at most.

    The library's own time-out may pass unheard, as where a thread of it gets no processor: then a `KafkaException` says
    so, so that nobody has two kinds to catch.
    """
    try:
        return question.result(timeout_s)
    except TimeoutError:
        error = KafkaError(KafkaError._TIMED_OUT, f"the client did not answer within {timeout_s:g} s")  # noqa: SLF001 - the library's public constants look so
        raise KafkaException(error) from None


def is_transient(error: KafkaException | KafkaError) -> bool:
    """Tell whether the same question may be answered a moment later, without anybody doing something about it."""
    inner = error.args[0] if isinstance(error, KafkaException) and error.args else error
    return isinstance(inner, KafkaError) and (inner.retriable() or inner.code() in _TRANSIENT)


def partition_counts(
    admin: AdminClient, bootstrap_servers: str, timeout_s: float = CONNECT_TIMEOUT_S
) -> dict[str, int]:
    """Return the number of partitions of every topic the client may see.

    Raises:
        BrokerConnectionError: no broker answered within `timeout_s` seconds; at once where none lets the client in.
    """
    metadata = first_answer(admin, bootstrap_servers, timeout_s, lambda: admin.list_topics(timeout=timeout_s))
    return {name: len(topic.partitions) for name, topic in metadata.topics.items() if topic.error is None}


def hidden_topics(admin: AdminClient, topics: Iterable[str], timeout_s: float = CONNECT_TIMEOUT_S) -> list[str]:
    """Return those topics that the brokers say nothing of because this client has no right on them.

    The list of all topics leaves them out, as it does those that do not exist; asked by name, the brokers tell them
    apart.
    """
    names = sorted(set(topics))
    if not names:
        return []
    asked = admin.describe_topics(TopicCollection(names), request_timeout=timeout_s)
    errors = {name: future.exception() for name, future in asked.items()}
    return [name for name, error in errors.items() if isinstance(error, KafkaException) and is_missing_right(error)]


def require_topics(
    admin: AdminClient,
    bootstrap_servers: str,
    topics: Iterable[str],
    *,
    to: Operation = Operation.READ,
    principal: str = THIS_CLIENT,
) -> dict[str, int]:
    """Return the number of partitions of each named topic.

    Where one cannot be seen, the error says that `principal` lacks the right `to` it.

    Raises:
        BrokerConnectionError: no broker answered.
        MissingRightError: this client may not know of a topic; all such are named.
        TopicNotFoundError: at least one topic does not exist; all missing ones are named.
    """
    counts = partition_counts(admin, bootstrap_servers)
    wanted = list(topics)
    missing = sorted(name for name in wanted if name not in counts)
    if hidden := hidden_topics(admin, missing):
        raise MissingRightError(
            f"{_topics(hidden)} cannot be seen at {bootstrap_servers}",
            [topic_right(to, name) for name in hidden],
            principal,
        )
    if missing:
        # What is not hidden now may have been when the topics were listed: the right to see it was given in between.
        counts = partition_counts(admin, bootstrap_servers)
        missing = sorted(name for name in wanted if name not in counts)
    if missing:
        raise TopicNotFoundError(
            f"no such topic at {bootstrap_servers}: {', '.join(missing)}; create it first, or correct the name"
        )
    return {name: counts[name] for name in wanted}


def _topics(names: Sequence[str]) -> str:
    return f"topic{'s' if len(names) > 1 else ''} {', '.join(names)}"


def ensure_topics(
    admin: AdminClient,
    bootstrap_servers: str,
    specs: Iterable[TopicSpec],
    *,
    needs: Mapping[str, Sequence[Operation]] = MappingProxyType({}),
    principal: str = THIS_CLIENT,
) -> dict[str, int]:
    """Create the topics that do not exist and return the number of partitions of each.

    A topic that exists is left as it is. The replication factor is the broker's default. One that can be done without
    and is refused is left out of what is returned, and a warning tells. Where one cannot be seen, the error says that
    `principal` lacks what the topic is needed for, by name in `needs`.

    Raises:
        BrokerConnectionError: no broker answered.
        MissingRightError: this client may not create one, or not see one that is there.
        PenstockError: the broker refused to create one; the message says why.
    """
    wanted = {spec.name: spec for spec in specs}
    counts = partition_counts(admin, bootstrap_servers)
    missing = [spec for name, spec in wanted.items() if name not in counts]
    if missing:
        futures = admin.create_topics(
            [
                NewTopic(spec.name, num_partitions=spec.partitions, replication_factor=-1, config=dict(spec.config))
                for spec in missing
            ]
        )
        for name, future in futures.items():
            try:
                future.result()
            except KafkaException as error:
                # Two processes that start together both create: the loser finds what it wanted, if it may see it.
                is_hidden = bool(hidden_topics(admin, [name]))
                if error.args[0].code() == KafkaError.TOPIC_ALREADY_EXISTS and not is_hidden:
                    continue
                # Or it was hidden at first, and the right to see it was given in between.
                if is_missing_right(error) and not is_hidden and name in partition_counts(admin, bootstrap_servers):
                    continue
                if not wanted[name].is_optional:
                    if is_hidden or is_missing_right(error):
                        raise _not_created(name, principal, needs.get(name, ()), is_hidden=is_hidden) from error
                    raise PenstockError(
                        f"topic {name} is missing and could not be created: {reason(error)}; "
                        "create it by hand or allow this client to create topics"
                    ) from error
                # Of one that is hidden nobody knows whether it is missing.
                level = logging.INFO if is_hidden else logging.WARNING
                text = "topic %s is missing and could not be created: %s; it is done without"
                _log.log(level, text, name, reason(error))
                del wanted[name]
        made = {spec.name: spec.partitions for spec in missing if spec.name in wanted}
        _await_metadata(admin, set(made))
        counts = {**counts, **made}
    return {name: counts[name] for name in wanted}


def _not_created(name: str, principal: str, needs: Sequence[Operation], *, is_hidden: bool) -> MissingRightError:
    """Return the error of a topic that this client may not create, or that is there and cannot be seen."""
    create = topic_right(Operation.CREATE, name)
    if is_hidden:
        needed = [topic_right(operation, name) for operation in needs]
        return MissingRightError(
            f"topic {name} cannot be seen, nor created where it does not exist",
            needed or [topic_right(Operation.WRITE, name), create],
            principal,
        )
    return MissingRightError(
        f"topic {name} is missing and could not be created (somebody who may can create it by hand, too)",
        [create],
        principal,
    )


def message_limits(admin: AdminClient, topics: Iterable[str]) -> dict[str, int]:
    """Return `max.message.bytes` of each topic as the brokers apply it; without those that they do not tell."""
    resources = [ConfigResource(ResourceType.TOPIC, topic) for topic in topics]
    if not resources:
        return {}
    limits = {}
    for resource, future in admin.describe_configs(resources, request_timeout=CONNECT_TIMEOUT_S).items():
        try:
            limits[resource.name] = int(future.result()["max.message.bytes"].value)
        except (KafkaException, KeyError) as error:  # no right to ask is no reason not to run
            _log.info("the settings of topic %s are not told: %s", resource.name, error)
    return limits


def _await_metadata(admin: AdminClient, names: set[str]) -> None:
    """Wait until new topics are in the broker's metadata, which is a moment after their creation was answered.

    At most as long as a broker may take to answer: then the next call says what is the matter.
    """
    deadline = time.monotonic() + CONNECT_TIMEOUT_S
    while time.monotonic() < deadline:
        try:
            known = admin.list_topics(timeout=_METADATA_LOOK_S).topics
        except KafkaException:
            continue
        if all(name in known and known[name].error is None for name in names):
            return
        time.sleep(_LOOK_S)


__all__ = [
    "CONNECT_TIMEOUT_S",
    "TopicSpec",
    "admin_client",
    "answered",
    "ensure_topics",
    "hidden_topics",
    "is_transient",
    "message_limits",
    "not_answered",
    "partition_counts",
    "reason",
    "require_topics",
    "told_offset",
]
