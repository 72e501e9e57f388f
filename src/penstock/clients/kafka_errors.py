"""Classifies errors of the Kafka client: transient, out of range, missing permission, absent topic; and their texts."""

from __future__ import annotations

from enum import Enum, auto

from confluent_kafka import KafkaError, KafkaException

#: Transient errors: a leader moves, a broker starts or is briefly away, metadata has not spread yet, an answer took too
#: long. `KafkaError.retriable()` is false for all of them except in a transactional producer.
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

#: Answers of brokers to a client that lacks a permission. They last until an administrator gives it.
_REFUSALS = frozenset(
    {
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
        KafkaError.GROUP_AUTHORIZATION_FAILED,
        KafkaError.CLUSTER_AUTHORIZATION_FAILED,
        KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
        KafkaError.DELEGATION_TOKEN_AUTHORIZATION_FAILED,
    }
)

#: Answers of a coordinator to a member's commit in a rebalance, by either group protocol. The member commits again in
#: the new generation, or no longer has the partition. A fenced static member is not among them: it must end.
REBALANCING = frozenset(
    {
        KafkaError.ILLEGAL_GENERATION,
        KafkaError.REBALANCE_IN_PROGRESS,
        KafkaError.STALE_MEMBER_EPOCH,
        KafkaError.UNKNOWN_MEMBER_ID,
    }
)

#: The topic or partition does not exist, or brokers have not heard of it yet.
_GONE = frozenset({KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC, KafkaError._UNKNOWN_PARTITION})  # noqa: SLF001 - as above

#: The next offset is not in the log, and the consumer may not choose another: it reads nothing until it is assigned.
_OUT_OF_RANGE = frozenset({KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE, KafkaError._LOG_TRUNCATION})  # noqa: SLF001 - as above


class ErrorKind(Enum):
    """The kinds of errors that a consumer returns instead of a record."""

    #: The consumer is at the end of a partition: for a reader of committed records, at the last stable offset.
    END = auto()
    #: The log does not have the next offset.
    OUT_OF_RANGE = auto()
    #: A broker refused a group. A consumer that joined none can read all the same.
    GROUP = auto()
    #: A permission is missing.
    MISSING_RIGHT = auto()
    #: The topic or partition does not exist, or is new and not known to all brokers yet.
    GONE = auto()
    #: Transient: the client recovers by itself.
    PASSING = auto()
    #: Permanent.
    FATAL = auto()


def kind_of(error: KafkaError) -> ErrorKind:
    """Return the kind of an error that a consumer returned instead of a record."""
    if error.code() == KafkaError._PARTITION_EOF:  # noqa: SLF001 - as above
        return ErrorKind.END
    if error.code() in _OUT_OF_RANGE:
        return ErrorKind.OUT_OF_RANGE
    if concerns_a_group(error):
        return ErrorKind.GROUP
    if is_missing_right(error):
        return ErrorKind.MISSING_RIGHT
    if error.code() in _GONE:
        return ErrorKind.GONE
    return ErrorKind.PASSING if is_transient(error) and not error.fatal() else ErrorKind.FATAL


def _inner(error: BaseException | KafkaError) -> object:
    """Return the content of an exception, usually a `KafkaError`."""
    return error.args[0] if isinstance(error, KafkaException) and error.args else error


def reason(error: BaseException | KafkaError) -> str:
    """Return the text of an error, without the client library's wrapping."""
    inner = _inner(error)
    return f"{inner.str()} ({inner.name()})" if isinstance(inner, KafkaError) else str(inner)


def code_of(error: BaseException | KafkaError) -> int | None:
    """Return the code of a Kafka error, or None for other exceptions."""
    inner = _inner(error)
    return inner.code() if isinstance(inner, KafkaError) else None


def is_transient(error: KafkaException | KafkaError) -> bool:
    """Tell whether the same request may succeed a moment later, without anybody's help."""
    inner = _inner(error)
    return isinstance(inner, KafkaError) and (inner.retriable() or inner.code() in _TRANSIENT)


def is_missing_right(error: KafkaException | KafkaError) -> bool:
    """Tell whether a broker refused for a missing permission."""
    return code_of(error) in _REFUSALS


def is_rebalancing(error: BaseException | KafkaError) -> bool:
    """Tell whether a member's commit was refused because its group rebalances or its generation is over."""
    return code_of(error) in REBALANCING


def concerns_a_group(error: BaseException | KafkaError) -> bool:
    """Tell whether a broker refused a group.

    The client library asks for a group's coordinator even if partitions are assigned by hand. Such a consumer ignores
    this error and reads all the same.
    """
    return code_of(error) == KafkaError.GROUP_AUTHORIZATION_FAILED
