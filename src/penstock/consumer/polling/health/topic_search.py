"""The topic search: topics that the handlers' patterns match, found while the consumer runs.

penstock asks for the list of topics itself and subscribes to the names, where a client could subscribe to `^pattern`.
The client's own way has two dialects of expressions, librdkafka's and, with `group.protocol=consumer`, the broker's
RE2/J; users write Python's. It would hand over partitions of topics that nobody has looked at: of retry topics and dead
letters that the pattern happens to match, of a topic whose own retry and dead-letter topics are not there yet and whose
rights and id are not watched. And it offers no say in where a new topic begins. Subscribing again to a list of names
costs a cooperative rebalance that leaves everything else where it is, with both protocols, and members that hear of a
topic at different times merely take partitions of it at different times.

The question, and what has to be prepared for a topic, may wait for brokers, so both are done on a thread of their own;
what was found is applied on the poll thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

from confluent_kafka import KafkaException

from penstock.clients.cluster import Answer, Cluster
from penstock.clients.kafka_errors import reason
from penstock.consumer.handlers.handler import Handler, require_own_topics
from penstock.consumer.handlers.patterns import TopicPatterns, refuse_contested
from penstock.consumer.polling.health.startup_checks import create_outputs, output_topics
from penstock.consumer.routes import Routes
from penstock.errors import BrokerConnectionError, ConfigurationError, PenstockError

_log = logging.getLogger(__name__)


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
        # client may not see. Asked by name, brokers tell that apart.
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
