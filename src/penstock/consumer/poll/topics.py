"""The topics of a consumer: what must hold before it joins its group, and what becomes of them while it runs.

At the start topics exist, or are created, and permissions are given. While it runs, topics that the handlers' patterns
match are searched for. penstock asks for the list of topics itself and subscribes to the names, where a client could
subscribe to `^pattern`. The client's own way has two dialects of expressions, librdkafka's and, with
`group.protocol=consumer`, the broker's RE2/J; users write Python's. It would hand over partitions of topics that nobody
has looked at: of retry topics and dead letters that the pattern happens to match, of a topic whose own retry and
dead-letter topics are not there yet and whose rights and id are not watched. And it offers no say in where a new topic
begins. Subscribing again to a list of names costs a cooperative rebalance that leaves everything else where it is, with
both protocols, and members that hear of a topic at different times merely take partitions of it at different times. The
question, and what has to be prepared for a topic, may wait for brokers, so both are done on a thread of their own; what
was found is applied on the poll thread.

Topics are watched: the client reads a recreated topic from its position in the old one, silently, where no metadata
showed it absent in between. What the new one holds below that would be lost and committed. Topic ids differ
(KIP-516), and the client does not compare them (librdkafka 2.16), so the brokers are asked every few seconds. The same
answers show whether a topic is absent, and whether brokers answer at all.
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

#: Bytes that the headers of a dead letter may take, in addition to those of its message.
_HEADERS_BYTES = 65_536

#: Topics for dead letters and retries, each with those whose messages it takes.
OutputTopics = Mapping[str, tuple[str, ...]]


def output_topics(group: str, handlers: Mapping[str, Handler]) -> OutputTopics:
    """Return the topics for dead letters and retries, each with those whose messages it takes."""
    outputs: dict[str, tuple[str, ...]] = {}
    for topic, handler in handlers.items():
        if handler.on_failure is OnFailure.DEAD_LETTER:
            name = handler.dead_letter_topic.replace("{topic}", topic)
            outputs[name] = (*outputs.get(name, ()), topic)
        outputs |= dict.fromkeys(retry_topics(group, topic, handler.retry_delays), (topic,))
    return outputs


def result_topics(handlers: Iterable[Handler]) -> set[str]:
    """Return the topics that handlers name for what they return."""
    return {handler.to for handler in handlers if handler.to is not None}


def _rights(group: str, consumed: Iterable[str], handlers: Mapping[str, Handler]) -> list[Right]:
    """Return what brokers must allow a consumer whose topics are there."""
    written = dict.fromkeys([*output_topics(group, handlers), *sorted(result_topics(handlers.values()))])
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
    #: Topics for dead letters and retries, each with those that it takes messages of; its start makes them.
    outputs: Mapping[str, tuple[str, ...]]
    #: Those of them that are for retries.
    retries: tuple[str, ...]
    #: The least that brokers must allow, Create for what is to be made included.
    rights: tuple[Right, ...]


def needs_of(
    group: str, consumed: Iterable[str], handlers: Mapping[str, Handler], there: Collection[str], *, exactly_once: bool
) -> Needs:
    """Return what a consumer asks of a cluster where the topics `there` are."""
    consumed, outputs = tuple(consumed), output_topics(group, handlers)
    rights = _rights(group, consumed, handlers)
    rights += [topic_right(Operation.CREATE, name) for name in outputs if name not in there]
    if exactly_once:
        rights.append(transactional_right(transactional_ids(group)))
    read = tuple(name for name in consumed if name not in outputs)
    retries = tuple(name for name in consumed if name in outputs)
    results = sorted(result_topics(handlers.values()) - outputs.keys())
    return Needs(read, tuple(results), outputs, retries, tuple(rights))


def create_outputs(cluster: Cluster, partitions: Mapping[str, int], outputs: OutputTopics) -> None:
    """Create the topics for dead letters and retries that are absent; `MissingRightError` where that is refused."""
    if outputs:
        limits = cluster.message_limits({topic for sources in outputs.values() for topic in sources})
        cluster.ensure_topics(_spec(name, sources, partitions, limits) for name, sources in outputs.items())


def _spec(name: str, sources: Sequence[str], partitions: Mapping[str, int], limits: Mapping[str, int]) -> TopicSpec:
    """Return a topic that takes what its sources take, with our headers added."""
    known = [limits[topic] for topic in sources if topic in limits]
    config = {"max.message.bytes": str(max(known) + _HEADERS_BYTES)} if known else {}
    of = f"of {', '.join(sources)}"
    rename = (
        f"give the app another name, or leave retry_delays out of the handler {of}"
        if is_retry_topic(name)
        else f"give the handler {of} another dead_letter_topic"
    )
    return TopicSpec(name, max(partitions[topic] for topic in sources), config, rename=rename)


#: Seconds between two questions about the topics that are consumed.
WATCH_EVERY_S = 5.0


@dataclass(frozen=True, slots=True)
class _Found:
    """What a search has brought."""

    #: How many partitions each topic of the cluster has.
    partitions: Mapping[str, int]
    #: Topics that patterns match and that are not consumed yet.
    matches: Mapping[str, Handler]
    #: Those of them that cannot be consumed, and why. All that the others need is there.
    failures: Mapping[str, str]


class Topics:
    """On the poll thread once that runs, save where it says otherwise."""

    _cluster: Cluster

    def __init__(self, engine: Engine, refusals: Refusals) -> None:
        self._engine = engine
        self._routes = engine.routes
        self._refusals = refusals
        # Seconds between two searches; None for none after the start.
        self._every_s = engine.settings.topic_search_interval
        #: Why topics that a pattern matches are not consumed. Replaced as a whole: any thread may read it.
        self.failures: Mapping[str, str] = {}
        # The search and the question under way, and when the next are due.
        self._search: Answer[_Found] | None = None
        self._search_at = 0.0
        self._asked: Answer[TopicIds] | None = None
        self._ask_at = 0.0
        # By the last answer: the ids of topics, what is wrong with some, in words, and which do not exist. The words
        # are replaced as a whole, so that any thread may read them.
        self._ids: dict[str, str] = {}
        self._troubles: Mapping[str, str] = {}
        self._absent: frozenset[str] = frozenset()

    def begin(self, cluster: Cluster) -> None:
        """Check the topics and rights at the start, make the topics that are absent, and take those that are there.

        A topic that a pattern matches and that cannot be consumed yet, as where its dead letters have no topic, does
        not keep the others from it: else a topic that somebody makes would end the app at its next start.

        Raises `TopicNotFoundError` and `MissingRightError`, which name all that is missing, and
        `BrokerConnectionError`.
        """
        self._cluster, engine = cluster, self._engine
        group, handlers = engine.group, engine.handlers
        partitions, outputs = cluster.require_topics(handlers), output_topics(group, handlers)
        if any(handler.retry_delays for handler in handlers.values()):
            self._routes.add_former_delays(cluster.topics())
        # First: else those that are missing would be met one by one, and topics made for a group that cannot start.
        unknown = self._require(_rights(group, self._routes.topics, handlers))
        create_outputs(cluster, partitions, outputs)
        if unknown:
            # About topics that were just created.
            self._require(unknown)
        cluster.require_topics(result_topics(engine.all_handlers) - outputs.keys())
        if not engine.patterns:
            return
        self._take(self._look(frozenset()))
        self._search_at = engine.clock.monotonic() + (self._every_s or 0.0)
        for pattern, handler in self.without_topic().items():
            _log.warning("no topic matches the pattern %r of handler %s yet; %s", pattern, handler.name, self.when())

    def _require(self, rights: Sequence[Right]) -> Sequence[Right]:
        """Raise `MissingRightError` that names all rights which are missing; return those brokers say nothing of."""
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
        """Apply what was found, and search again when it is time; return whether other topics are consumed now."""
        if not self._engine.patterns or self._every_s is None:
            return False
        try:
            if self._search is None and now >= self._search_at:
                self._search_at = now + self._every_s
                known = frozenset(self._routes.handlers)
                self._search = self._cluster.in_background("a search for topics", partial(self._look, known))
            found = None if self._search is None else self._search.answer()
        except (PenstockError, KafkaException) as error:
            why = reason(error)
            _log.warning("topics could not be searched for: %s; it is tried again in %g s", why, self._every_s)
            self._search = None
            return False
        if found is None:
            return False
        self._search = None
        gone = self._gone(found)
        self._routes.let_go(gone)
        new = self._take(found)
        self._routes.new.update(new)
        for topic in gone:
            # It is another one when it comes back.
            self._ids.pop(topic, None)
        return bool(new or gone)

    def _look(self, known: frozenset[str]) -> _Found:
        """Search for topics beside those that are known, and prepare what they need. Any thread; may wait."""
        partitions = self._cluster.topics()
        matches = self._engine.patterns.matches(topic for topic in partitions if topic not in known)
        return _Found(partitions, matches, self._prepare(matches, partitions))

    def _prepare(self, handlers: Mapping[str, Handler], partitions: Mapping[str, int]) -> dict[str, str]:
        """Create the topics for dead letters and retries that are absent; return which topics cannot have them."""
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
            # One of them cannot: the others can.
            each = [self._prepare({topic: handler}, partitions) for topic, handler in handlers.items()]
            return {topic: why for failures in each for topic, why in failures.items()}
        return {}

    def _take(self, found: _Found) -> list[str]:
        """Consume what was found; return the topics that are consumed from now on."""
        ready = {topic: each for topic, each in found.matches.items() if topic not in found.failures}
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

    def _gone(self, found: _Found) -> set[str]:
        """Return the topics that a pattern had matched and that exist no more."""
        # Of two answers that agree: a broker that lags behind lists a topic late, and the list leaves out what this
        # client may not see. Asked by name, brokers distinguish that.
        matched = self._routes.handlers.keys() - self._engine.patterns.named.keys()
        gone = {topic for topic in matched if topic in self._absent and topic not in found.partitions}
        for topic in gone:
            _log.warning("topic %s was deleted: it is let go, and taken up again where it is made again", topic)
        return gone

    def without_topic(self) -> dict[str, Handler]:
        """Return the patterns that no topic matches, with their handlers. Any thread."""
        found = self._routes.handlers.keys() - self._engine.patterns.named.keys()
        return self._engine.patterns.without_topic(found | self.failures.keys())

    def when(self) -> str:
        """Say when topics are searched for."""
        return (
            "topics are not searched for again" if self._every_s is None else f"it is tried every {self._every_s:g} s"
        )

    def check(self, now: float) -> Sequence[str]:
        """Return the topics that were found to be recreated; ask again when it is time."""
        recreated: Sequence[str] = ()
        try:
            if self._asked is not None:
                found = self._asked.answer()
                if found is None:
                    return ()
                self._asked = None
                recreated = self._compare(found)
            if now >= self._ask_at:
                self._ask_at = now + WATCH_EVERY_S
                self._asked = self._cluster.ask_topic_ids(self._routes.topics)
        except (KafkaException, PenstockError) as error:
            self._asked = None
            why = f"the client cannot ask the brokers: {reason(error)}"
            self._troubles = dict.fromkeys(self._routes.topics, why)
        return recreated

    def _compare(self, found: TopicIds) -> list[str]:
        known, self._ids, self._absent = self._ids, {**self._ids, **found.ids}, found.absent
        troubles = {topic: f"brokers do not tell of the topic: {why}" for topic, why in found.failures.items()}
        troubles |= dict.fromkeys(found.absent, "the topic does not exist")
        self._troubles = troubles | {topic: self._refusals.of_topic(topic) for topic in found.unreadable}
        return [topic for topic, topic_id in found.ids.items() if known.get(topic, topic_id) != topic_id]

    def trouble(self, topic: str) -> str | None:
        """Return what is wrong with a topic, or None. Any thread."""
        return self._troubles.get(topic)
