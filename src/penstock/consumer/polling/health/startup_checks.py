"""What must hold before a consumer joins its group: topics exist, or are created, and rights are given."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from confluent_kafka import KafkaException

from penstock.clients.cluster import Cluster
from penstock.clients.kafka_errors import reason
from penstock.clients.requests.topics import TopicSpec
from penstock.clients.rights import MissingRightError, Operation, Right, group_right, topic_right, transactional_right
from penstock.consumer.handlers.handler import Handler
from penstock.consumer.handlers.options.handler_options import OnFailure
from penstock.consumer.outbox.transaction_runner import transactional_ids
from penstock.consumer.retry_topics import retry_topics

_log = logging.getLogger(__name__)

#: Bytes that the headers of a dead letter may take, beside those that the message had.
_HEADERS_BYTES = 65_536

#: Topics for dead letters and retries, each with those whose messages it takes.
OutputTopics = Mapping[str, tuple[str, ...]]


def writes_outputs(handler: Handler) -> bool:
    """Tell whether a handler may have messages written to another topic."""
    return handler.on_failure is OnFailure.DEAD_LETTER or bool(handler.retry_delays)


def output_topics(group: str, handlers: Mapping[str, Handler]) -> OutputTopics:
    """Return the topics for dead letters and retries, each with those whose messages it takes."""
    outputs: dict[str, tuple[str, ...]] = {}
    for topic, handler in handlers.items():
        if handler.on_failure is OnFailure.DEAD_LETTER:
            name = handler.dead_letter_topic.replace("{topic}", topic)
            outputs[name] = (*outputs.get(name, ()), topic)
        outputs |= dict.fromkeys(retry_topics(group, topic, handler.retry_delays), (topic,))
    return outputs


def rights_of(group: str, consumed: Iterable[str], handlers: Mapping[str, Handler]) -> list[Right]:
    """Return what brokers must allow."""
    written = dict.fromkeys(output_topics(group, handlers))
    written |= dict.fromkeys(handler.to for handler in handlers.values() if handler.to is not None)
    return [
        group_right(group),
        *(topic_right(Operation.READ, topic) for topic in consumed),
        *(topic_right(Operation.WRITE, topic) for topic in written),
    ]


@dataclass(frozen=True, slots=True)
class Needs:
    """What a consumer asks of a cluster."""

    #: Topics that it reads.
    consumed: tuple[str, ...]
    #: Topics that its handlers name for what they return.
    results: tuple[str, ...]
    #: Topics for dead letters and retries; its start makes those that are absent.
    outputs: tuple[str, ...]
    #: Those of them that are for retries.
    retries: tuple[str, ...]
    #: The least that brokers must allow, Create for what is to be made included.
    rights: tuple[Right, ...]


def needs_of(
    group: str, consumed: Iterable[str], handlers: Mapping[str, Handler], there: Collection[str], *, exactly_once: bool
) -> Needs:
    """Return what a consumer asks of a cluster where the topics `there` are."""
    consumed, outputs = tuple(consumed), tuple(output_topics(group, handlers))
    rights = rights_of(group, consumed, handlers)
    rights += [topic_right(Operation.CREATE, name) for name in outputs if name not in there]
    if exactly_once:
        rights.append(transactional_right(transactional_ids(group)))
    results = {handler.to for handler in handlers.values() if handler.to is not None} - set(outputs)
    read = tuple(name for name in consumed if name not in outputs)
    retries = tuple(name for name in consumed if name in outputs)
    return Needs(read, tuple(sorted(results)), outputs, retries, tuple(rights))


def prepare_topics(
    group: str,
    consumed: Iterable[str],
    handlers: Mapping[str, Handler],
    cluster: Cluster,
    partitions: Mapping[str, int],
) -> None:
    """Check rights, and create the topics for dead letters and retries that are absent.

    Raises `BrokerConnectionError`, and `MissingRightError` that names all that is missing.
    """
    unknown = _require(cluster, group, rights_of(group, consumed, handlers))
    create_outputs(cluster, partitions, output_topics(group, handlers))
    if unknown:
        # About topics that were just created.
        _require(cluster, group, unknown)


def _require(cluster: Cluster, group: str, rights: Sequence[Right]) -> Sequence[Right]:
    """Raise `MissingRightError` that names all rights which are missing; return those that brokers tell nothing of."""
    try:
        found = cluster.ask_rights(rights).wait()
    except KafkaException as error:
        _log.info("the rights of group %s are not known: %s", group, reason(error))
        return ()
    if found.missing:
        raise MissingRightError(f"group {group} cannot start", found.missing, cluster.principal)
    return found.unknown


def create_outputs(cluster: Cluster, partitions: Mapping[str, int], outputs: OutputTopics) -> None:
    """Create the topics for dead letters and retries that are absent; `MissingRightError` where that is refused."""
    if outputs:
        limits = cluster.message_limits({topic for sources in outputs.values() for topic in sources})
        cluster.ensure_topics(_spec(name, sources, partitions, limits) for name, sources in outputs.items())


def _spec(name: str, sources: Sequence[str], partitions: Mapping[str, int], limits: Mapping[str, int]) -> TopicSpec:
    """Return a topic that takes what its sources take, with our headers beside."""
    known = [limits[topic] for topic in sources if topic in limits]
    config = {"max.message.bytes": str(max(known) + _HEADERS_BYTES)} if known else {}
    return TopicSpec(name, max(partitions[topic] for topic in sources), config)
