"""The topics of a consumer: what must hold before it joins its group, and what becomes of them while it runs.

At the start topics exist, or are created, and rights are given. While it runs, topics that the handlers' patterns match
are searched for. penstock asks for the list of topics itself and subscribes to the names, where a client could
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
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from confluent_kafka import KafkaException

from penstock.clients.cluster import Answer, Cluster
from penstock.clients.kafka_errors import reason
from penstock.clients.rights import MissingRightError, Operation, Right, group_right, topic_right, transactional_right
from penstock.clients.topics import TopicIds, TopicSpec
from penstock.consumer.handlers.handler import Handler, require_own_topics
from penstock.consumer.handlers.options import OnFailure
from penstock.consumer.handlers.registry import TopicPatterns, refuse_contested
from penstock.consumer.handlers.route import Routes
from penstock.consumer.outbox.transaction_runner import transactional_ids
from penstock.consumer.retry_topics import is_retry_topic, retry_topics
from penstock.errors import BrokerConnectionError, ConfigurationError, PenstockError

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


@dataclass(frozen=True, slots=True)
class Found:
    """What a search has brought."""

    #: How many partitions each topic of the cluster has.
    partitions: Mapping[str, int]
    #: Topics that are to be consumed from now on: all they need is there.
    handlers: Mapping[str, Handler]
    #: Topics that several patterns match, with the names of their handlers.
    contested: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    #: Topics that cannot be consumed, and why.
    failures: Mapping[str, str] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True, eq=False, repr=False)
class TopicSearch:
    """On the poll thread once that runs, save where it says otherwise."""

    group: str
    patterns: TopicPatterns
    routes: Routes
    cluster: Cluster
    #: Seconds between two searches; None for none after the start.
    every_s: float | None
    #: Called when the topics that are consumed have changed.
    changed: Callable[[], None] = lambda: None
    #: Returns which of the topics that are consumed do not exist, as the brokers answered last to their names.
    absent: Callable[[], frozenset[str]] = frozenset
    #: Why topics that a pattern matches are not consumed. Replaced as a whole: any thread may read it.
    failures: Mapping[str, str] = field(default_factory=dict, init=False)
    _asked: Answer[Found] | None = field(default=None, init=False)
    _next: float = field(default=0.0, init=False)

    def begin(self, now: float) -> None:
        """Take the topics that are there at the start. Raises `BrokerConnectionError`, and `ConfigurationError`.

        A topic that cannot be consumed yet, as where its dead letters have no topic, does not keep the others from it:
        else a topic that somebody makes would end the app at its next start.
        """
        if not self.patterns:
            return
        found = self._look(frozenset())
        refuse_contested(found.contested)
        self._take(found)
        self._next = now + (self.every_s or 0.0)
        for pattern, handler in self.without_topic().items():
            _log.warning("no topic matches the pattern %r of handler %s yet; %s", pattern, handler.name, self.when())

    def check(self, now: float) -> None:
        """Apply what was found; search again when it is time."""
        if not self.patterns or self.every_s is None:
            return
        try:
            if self._asked is None and now >= self._next:
                self._next = now + self.every_s
                known = frozenset(self.routes.handlers)
                self._asked = self.cluster.in_background("a search for topics", partial(self._look, known))
            found = None if self._asked is None else self._asked.answer()
        except (PenstockError, KafkaException) as error:
            why = reason(error) if isinstance(error, KafkaException) else str(error)
            _log.warning("topics could not be searched for: %s; it is tried again in %g s", why, self.every_s)
            self._asked = None
            return
        if found is None:
            return
        self._asked = None
        self.routes.new.update(found.handlers)
        gone = self._gone(found)
        self.routes.let_go(gone)
        if self._take(found) or gone:
            self.changed()

    def _look(self, known: frozenset[str]) -> Found:
        """Search for topics beside those that are known, and prepare what they need. Any thread; may wait."""
        partitions = self.cluster.topics()
        matches = self.patterns.matches(topic for topic in partitions if topic not in known)
        failures, ready = dict[str, str](), dict[str, Handler]()
        for topic, handler in matches.handlers.items():
            try:
                require_own_topics(self.group, {**self.patterns.named, topic: handler})
                ready[topic] = handler
            except ConfigurationError as error:
                failures[topic] = str(error)
        try:
            self._prepare(ready, partitions)
        except BrokerConnectionError:
            raise
        except PenstockError:
            # One of them cannot be: the others can.
            for topic, handler in list(ready.items()):
                try:
                    self._prepare({topic: handler}, partitions)
                except PenstockError as error:
                    failures[topic] = str(error)
                    del ready[topic]
        return Found(partitions, ready, matches.contested, failures)

    def _prepare(self, handlers: Mapping[str, Handler], partitions: Mapping[str, int]) -> None:
        """Create the topics for dead letters and retries that are absent."""
        create_outputs(self.cluster, partitions, output_topics(self.group, handlers))

    def _take(self, found: Found) -> bool:
        """Consume what was found; return whether there was anything."""
        for topic, handler in found.handlers.items():
            self.routes.add(topic, handler)
            _log.info("topic %s is consumed by handler %s, whose pattern it matches", topic, handler.name)
            if topic in found.contested:
                text = "topic %s is matched by the patterns of several handlers: %s; the first registered takes it"
                _log.error(text, topic, ", ".join(found.contested[topic]))
        for topic, why in found.failures.items():
            if self.failures.get(topic) != why:
                _log.error("topic %s matches a pattern and cannot be consumed: %s", topic, why)
        self.failures = found.failures
        self.routes.add_former_delays(found.partitions)
        return bool(found.handlers)

    def _gone(self, found: Found) -> set[str]:
        """Return the topics that a pattern had matched and that exist no more."""
        # Of two answers that agree: a broker that lags behind lists a topic late, and the list leaves out what this
        # client may not see. Asked by name, brokers distinguish that.
        absent = self.absent()
        matched = self.routes.handlers.keys() - self.patterns.named.keys()
        gone = {topic for topic in matched if topic in absent and topic not in found.partitions}
        for topic in gone:
            _log.warning("topic %s was deleted: it is let go, and taken up again where it is made again", topic)
        return gone

    def without_topic(self) -> dict[str, Handler]:
        """Return the patterns that no topic matches, with their handlers. Any thread."""
        found = self.routes.handlers.keys() - self.patterns.named.keys()
        return self.patterns.without_topic(found | self.failures.keys())

    def when(self) -> str:
        """Say when topics are searched for."""
        return "topics are not searched for again" if self.every_s is None else f"it is tried every {self.every_s:g} s"


#: Seconds between two questions.
_WATCH_EVERY_S = 5.0


class TopicWatch:
    """Asks for the ids of topics, and whether this client may read them. On the poll thread only, save `trouble`.

    `refused` says what is missing to read a topic.
    """

    def __init__(
        self, topics: Sequence[str], ask: Callable[[Sequence[str]], Answer[TopicIds]], refused: Callable[[str], str]
    ) -> None:
        self._topics = list(topics)
        self._ask = ask
        self._refused = refused
        self._asked: Answer[TopicIds] | None = None
        self._next = 0.0
        self._ids: dict[str, str] = {}
        # What is wrong with a topic, in words. Replaced as a whole, so that any thread may read it.
        self._troubles: dict[str, str] = {}
        #: Those of them that did not exist, at the last answer.
        self.absent: frozenset[str] = frozenset()

    def watch(self, topics: Sequence[str]) -> None:
        """Ask for these topics from now on. One that is watched no more is another one when it comes back."""
        self._topics, watched = list(topics), set(topics)
        self._ids = {topic: topic_id for topic, topic_id in self._ids.items() if topic in watched}
        self._troubles = {topic: why for topic, why in self._troubles.items() if topic in watched}

    def check_now(self) -> None:
        """Ask at the next `check`: the client has found something wrong."""
        self._next = 0.0

    def check(self, now: float) -> list[str]:
        """Return the topics that were found to be recreated; ask again when it is time."""
        recreated: list[str] = []
        try:
            if self._asked is not None:
                found = self._asked.answer()
                if found is None:
                    return []
                self._asked = None
                recreated = self._compare(found)
            if now >= self._next:
                self._next = now + _WATCH_EVERY_S
                self._asked = self._ask(self._topics)
        except (KafkaException, PenstockError) as error:
            self._asked = None
            self._troubles = dict.fromkeys(self._topics, f"the client cannot ask the brokers: {reason(error)}")
        return recreated

    def _compare(self, found: TopicIds) -> list[str]:
        known, watched = self._ids, set(self._topics)
        # Some that were asked for may not be watched any more.
        ids = {topic: topic_id for topic, topic_id in found.ids.items() if topic in watched}
        recreated = [topic for topic, topic_id in ids.items() if known.get(topic, topic_id) != topic_id]
        self._ids = {**known, **ids}
        self.absent = found.absent
        self._troubles = {
            topic: "the topic does not exist" if topic in found.absent else f"brokers do not tell of the topic: {why}"
            for topic, why in found.failures.items()
            if topic in watched
        }
        self._troubles |= {topic: self._refused(topic) for topic in found.unreadable if topic in watched}
        return recreated

    def trouble(self, topic: str) -> str | None:
        """Return what is wrong with a topic, or None. Any thread."""
        return self._troubles.get(topic)
