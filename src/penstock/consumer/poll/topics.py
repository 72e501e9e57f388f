"""Topics: checks them before the consumer joins its group, then searches for new topics and watches the known ones.

At the start, every topic exists or is created, and every permission is given. While the consumer runs, it searches for
topics that match the handlers' patterns. penstock lists the topics itself and subscribes to names. It does not let the
client subscribe to `^pattern`, for these reasons:

- There are two dialects of expressions: librdkafka's and, with `group.protocol=consumer`, the broker's RE2/J. Users
  write Python's.
- The client would assign partitions of topics that were never checked: retry topics and dead letters that happen to
  match, and topics without their own retry and dead-letter topics, whose rights and id are not watched.
- The start of a new topic could not be chosen.

Each new list of names costs a cooperative rebalance that leaves everything else in place, with both protocols. Members
that hear of a topic at different times only take its partitions at different times. The search and the preparation of a
topic may wait for brokers, so they have a thread of their own. The poll thread applies the results.

Known topics are watched, because the client silently reads a recreated topic from the position in the old one, unless
metadata showed the topic as absent in between. The messages below that position would be lost, and committed. The topic
id differs (KIP-516), but the client does not compare ids (librdkafka 2.16). So the brokers are asked every few seconds.
The answers also show whether a topic is absent, and whether brokers answer at all.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from confluent_kafka import KafkaException

from penstock.clients.cluster import Answer, Cluster
from penstock.clients.kafka_errors import reason
from penstock.clients.rights import MissingRightError, Operation, Right, group_right, topic_right, transactional_right
from penstock.clients.topics import TopicIds, TopicSpec
from penstock.consumer.engine import Engine
from penstock.consumer.handlers.handler import Handler, require_own_topics
from penstock.consumer.handlers.options import OnFailure
from penstock.consumer.outbox.transaction_runner import transactional_ids
from penstock.consumer.poll.refusals import Refusals
from penstock.consumer.retry_topics import is_retry_topic, retry_topics
from penstock.errors import BrokerConnectionError, PenstockError

_log = logging.getLogger(__name__)

#: Bytes allowed for the headers that a dead letter adds to its message.
_HEADERS_BYTES = 65_536

#: Topics for dead letters and retries, each with its source topics.
OutputTopics = Mapping[str, tuple[str, ...]]


def output_topics(group: str, handlers: Mapping[str, Handler]) -> OutputTopics:
    """Return the topics for dead letters and retries, each with its source topics."""
    outputs: dict[str, tuple[str, ...]] = {}
    for topic, handler in handlers.items():
        if handler.on_failure is OnFailure.DEAD_LETTER:
            name = handler.dead_letter_topic_of(topic)
            outputs[name] = (*outputs.get(name, ()), topic)
        outputs |= dict.fromkeys(retry_topics(group, topic, handler.retry_delays), (topic,))
    return outputs


def result_topics(handlers: Iterable[Handler]) -> set[str]:
    """Return the topics that handlers name for their results."""
    return {handler.to for handler in handlers if handler.to is not None}


def _rights(group: str, consumed: Iterable[str], handlers: Mapping[str, Handler]) -> list[Right]:
    """Return the rights of a consumer whose topics exist."""
    written = dict.fromkeys([*output_topics(group, handlers), *sorted(result_topics(handlers.values()))])
    return [
        group_right(group),
        *(topic_right(Operation.READ, topic) for topic in consumed),
        *(topic_right(Operation.WRITE, topic) for topic in written),
    ]


@dataclass(frozen=True, slots=True)
class Needs:
    """What a consumer needs from a cluster."""

    #: Topics that it reads.
    consumed: tuple[str, ...]
    #: Topics that its handlers name for their results.
    results: tuple[str, ...]
    #: Topics for dead letters and retries, each with its source topics. The start creates them.
    outputs: Mapping[str, tuple[str, ...]]
    #: The retry topics among them.
    retries: tuple[str, ...]
    #: The least rights, including Create for topics that must be created.
    rights: tuple[Right, ...]


def needs_of(
    group: str,
    consumed: Iterable[str],
    handlers: Mapping[str, Handler],
    existing: Collection[str],
    *,
    exactly_once: bool,
) -> Needs:
    """Return what a consumer needs from a cluster that has the `existing` topics."""
    consumed, outputs = tuple(consumed), output_topics(group, handlers)
    rights = _rights(group, consumed, handlers)
    rights += [topic_right(Operation.CREATE, name) for name in outputs if name not in existing]
    if exactly_once:
        rights.append(transactional_right(transactional_ids(group)))
    read = tuple(name for name in consumed if name not in outputs)
    retries = tuple(name for name in consumed if name in outputs)
    results = sorted(result_topics(handlers.values()) - outputs.keys())
    return Needs(read, tuple(results), outputs, retries, tuple(rights))


def create_outputs(cluster: Cluster, partitions: Mapping[str, int], outputs: OutputTopics) -> None:
    """Create absent topics for dead letters and retries; raise `MissingRightError` if brokers refuse."""
    if outputs:
        limits = cluster.message_limits({topic for sources in outputs.values() for topic in sources})
        cluster.ensure_topics(_spec(name, sources, partitions, limits) for name, sources in outputs.items())


def _spec(name: str, sources: Sequence[str], partitions: Mapping[str, int], limits: Mapping[str, int]) -> TopicSpec:
    """Return a topic that accepts the messages of its sources, with our headers added."""
    known = [limits[topic] for topic in sources if topic in limits]
    config = {"max.message.bytes": str(max(known) + _HEADERS_BYTES)} if known else {}
    of = f"of {', '.join(sources)}"
    rename = (
        f"give the app another name, or leave retry_delays out of the handler {of}"
        if is_retry_topic(name)
        else f"give the handler {of} another dead_letter_topic"
    )
    return TopicSpec(name, max(partitions[topic] for topic in sources), config, rename=rename)


#: Seconds between two requests for the ids of the consumed topics.
WATCH_INTERVAL_S = 5.0


@dataclass(frozen=True, slots=True)
class _Found:
    #: The number of partitions of each topic of the cluster.
    partitions: Mapping[str, int]
    #: Topics that match a pattern and are not consumed yet.
    matches: Mapping[str, Handler]
    #: Matches that cannot be consumed, each with the reason. The other matches have all topics they need.
    failures: Mapping[str, str]


class Topics:
    """Checks, searches and watches the topics of an engine. On the poll thread once it runs, except where stated."""

    _cluster: Cluster

    def __init__(self, engine: Engine, refusals: Refusals) -> None:
        self._engine = engine
        self._routes = engine.routes
        self._refusals = refusals
        # Seconds between two searches; None if only the start searches.
        self._search_interval_s = engine.settings.topic_search_interval
        #: Matches that cannot be consumed, each with the reason. Replaced as a whole: any thread may read it.
        self.failures: Mapping[str, str] = {}
        # The running search and the running request for topic ids, and when the next ones are due.
        self._search: Answer[_Found] | None = None
        self._search_at = 0.0
        self._request: Answer[TopicIds] | None = None
        self._request_at = 0.0
        # From the last answer: topic ids, the trouble of topics in words, and topics that do not exist. The words are
        # replaced as a whole, so any thread may read them.
        self._ids: dict[str, str] = {}
        self._troubles: Mapping[str, str] = {}
        self._absent: frozenset[str] = frozenset()
        #: Topics of which no member gets partitions, because they are absent or unreadable, each with the reason.
        #: Replaced as a whole: any thread may read it.
        self.unassignable: Mapping[str, str] = {}

    def begin(self, cluster: Cluster) -> None:
        """Check topics and rights at the start, create absent output topics, and route the topics that match patterns.

        A match that cannot be consumed yet, for example because its dead-letter topic cannot be created, does not stop
        the others. Otherwise a new topic could make the next start of the app fail.

        Raises `TopicNotFoundError` and `MissingRightError`, which name everything that is missing, and
        `BrokerConnectionError`.
        """
        self._cluster, engine = cluster, self._engine
        group, handlers = engine.group, engine.handlers
        partitions, outputs = cluster.require_topics(handlers), output_topics(group, handlers)
        if any(handler.retry_delays for handler in handlers.values()):
            self._routes.add_former_delays(cluster.topics())
        # Before topics are created: the error names all missing rights at once, and a refused group creates nothing.
        unknown = self._require(_rights(group, self._routes.topics, handlers))
        create_outputs(cluster, partitions, outputs)
        if unknown:
            # These rights are about topics that now exist.
            self._require(unknown)
        cluster.require_topics(result_topics(engine.all_handlers) - outputs.keys())
        if not engine.patterns:
            return
        self._apply(self._search_cluster(frozenset()))
        self._search_at = engine.clock.monotonic() + (self._search_interval_s or 0.0)
        for pattern, handler in self.without_topic().items():
            _log.warning("no topic matches the pattern %r of handler %s yet; %s", pattern, handler.name, self.when())

    def _require(self, rights: Sequence[Right]) -> Sequence[Right]:
        """Raise `MissingRightError` with all missing rights; return the rights that brokers say nothing about."""
        engine = self._engine
        try:
            found = self._cluster.ask_rights(rights).wait()
        except KafkaException as error:
            _log.info("the rights of group %s are not known: %s", engine.group, reason(error))
            return ()
        if found.missing:
            raise MissingRightError(f"group {engine.group} cannot start", found.missing, engine.principal)
        return found.unknown

    def search(self, now: float) -> bool:
        """Apply the result of a search, and start the next if it is due; return whether other topics are consumed."""
        if not self._engine.patterns or self._search_interval_s is None:
            return False
        try:
            if self._search is None and now >= self._search_at:
                self._search_at = now + self._search_interval_s
                known = frozenset(self._routes.handlers)
                self._search = self._cluster.in_background("a search for topics", partial(self._search_cluster, known))
            found = None if self._search is None else self._search.answer()
        except (PenstockError, KafkaException) as error:
            why = reason(error)
            _log.warning(
                "topics could not be searched for: %s; it is tried again in %g s", why, self._search_interval_s
            )
            self._search = None
            return False
        if found is None:
            return False
        self._search = None
        deleted = self._deleted(found)
        self._routes.let_go(deleted)
        new = self._apply(found)
        self._routes.new.update(new)
        for topic in deleted:
            # If the topic is created again, it has a new id.
            self._ids.pop(topic, None)
        return bool(new or deleted)

    def _search_cluster(self, known: frozenset[str]) -> _Found:
        """Search for topics besides the known ones, and create what they need. Any thread; may wait."""
        partitions = self._cluster.topics()
        matches = self._engine.patterns.matches(topic for topic in partitions if topic not in known)
        return _Found(partitions, matches, self._prepare(matches, partitions))

    def _prepare(self, handlers: Mapping[str, Handler], partitions: Mapping[str, int]) -> dict[str, str]:
        """Create absent topics for dead letters and retries; return the topics without them, each with the reason."""
        group, named = self._engine.group, self._engine.patterns.named
        try:
            for topic, handler in handlers.items():
                require_own_topics(group, {**named, topic: handler})
            create_outputs(self._cluster, partitions, output_topics(group, handlers))
        except BrokerConnectionError:
            raise
        except PenstockError as error:
            if len(handlers) == 1:
                return dict.fromkeys(handlers, str(error))
            # Only some of them fail: try each separately.
            failures: dict[str, str] = {}
            for topic, handler in handlers.items():
                failures |= self._prepare({topic: handler}, partitions)
            return failures
        return {}

    def _apply(self, found: _Found) -> list[str]:
        """Consume the topics that were found; return those that are new."""
        ready = {topic: handler for topic, handler in found.matches.items() if topic not in found.failures}
        for topic, handler in ready.items():
            self._routes.add(topic, handler)
            _log.info("topic %s is consumed by handler %s, whose pattern it matches", topic, handler.name)
            names = [candidate.name for candidate in self._engine.patterns.candidates(topic)]
            if len(names) > 1:
                text = "topic %s is matched by the patterns of several handlers: %s; the first registered takes it"
                _log.error(text, topic, ", ".join(names))
        for topic, why in found.failures.items():
            if self.failures.get(topic) != why:
                _log.error("topic %s matches a pattern and cannot be consumed: %s", topic, why)
        self.failures = found.failures
        self._routes.add_former_delays(found.partitions)
        return list(ready)

    def _deleted(self, found: _Found) -> set[str]:
        """Return the topics that matched a pattern and no longer exist."""
        # Two answers must agree: a broker that lags behind lists a topic late, and the list leaves out topics that this
        # client may not see. An answer by name distinguishes these cases.
        matched = self._routes.handlers.keys() - self._engine.patterns.named.keys()
        deleted = {topic for topic in matched if topic in self._absent and topic not in found.partitions}
        for topic in deleted:
            _log.warning("topic %s was deleted: it is no longer consumed until it is created again", topic)
        return deleted

    def without_topic(self) -> dict[str, Handler]:
        """Return the patterns that no topic matches, with their handlers. Any thread."""
        found = self._routes.handlers.keys() - self._engine.patterns.named.keys()
        return self._engine.patterns.without_topic(found | self.failures.keys())

    def when(self) -> str:
        """Return the sentence about the next search."""
        return (
            "topics are not searched for again"
            if self._search_interval_s is None
            else f"it is tried every {self._search_interval_s:g} s"
        )

    def check(self, now: float) -> Sequence[str]:
        """Return the topics that were recreated; send the next request for topic ids if it is due."""
        recreated: Sequence[str] = ()
        try:
            if self._request is not None:
                found = self._request.answer()
                if found is None:
                    return ()
                self._request = None
                recreated = self._compare(found)
            if now >= self._request_at:
                self._request_at = now + WATCH_INTERVAL_S
                self._request = self._cluster.ask_topic_ids(self._routes.topics)
        except (KafkaException, PenstockError) as error:
            self._request = None
            why = f"the client cannot ask the brokers: {reason(error)}"
            self._troubles = dict.fromkeys(self._routes.topics, why)
        return recreated

    def _compare(self, found: TopicIds) -> list[str]:
        known, self._ids, self._absent = self._ids, {**self._ids, **found.ids}, found.absent
        troubles = {topic: f"brokers do not report the topic: {why}" for topic, why in found.failures.items()}
        unassignable = dict.fromkeys(found.absent, "the topic does not exist")
        self.unassignable = unassignable | {topic: self._refusals.of_topic(topic) for topic in found.unreadable}
        self._troubles = {**troubles, **self.unassignable}
        return [topic for topic, topic_id in found.ids.items() if known.get(topic, topic_id) != topic_id]

    def trouble(self, topic: str) -> str | None:
        """Return the trouble of a topic, or None. Any thread."""
        return self._troubles.get(topic)
