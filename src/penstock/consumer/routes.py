"""The routes of a consumer: which handler takes a topic, and how, for every topic that is or was consumed.

Topics that a pattern matches are found while it runs, so routes come, and topics go. A route stays: what is still in
flight of its topic needs it, and so does the topic when it comes back.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from penstock.clients.cluster import Clock
from penstock.consumer.handlers.context import ContextFactory
from penstock.consumer.handlers.environment.middleware import MiddlewareSpec, cancelled_after, wrap
from penstock.consumer.handlers.handler import Handler, Kind, SpaceNumbers, ordering_of
from penstock.consumer.handlers.options.rate_limits import TokenBucket
from penstock.consumer.handlers.results import ResultMaker, with_results
from penstock.consumer.handlers.route import Invoke, Route
from penstock.consumer.retry_topics import RetryHeaders, former_retry_topics, retry_topics
from penstock.message import Record
from penstock.routing import Lane

if TYPE_CHECKING:
    from penstock.telemetry import ConsumerTelemetry


class Routes(Mapping[str, Route]):
    """Routes by topic, those of retry topics included.

    Written by who starts the consumer, then by the poll thread alone; read by any thread. Each change replaces a whole
    mapping, so that nobody meets one that changes, and no lock is needed. `lanes_of` returns the lanes of a handler.
    """

    def __init__(
        self,
        group: str,
        clock: Clock,
        lanes_of: Callable[[Handler], Sequence[Lane[Any, Record]]],
        *,
        middlewares: Sequence[MiddlewareSpec],
        contexts: ContextFactory,
        telemetry: ConsumerTelemetry | None,
        time_limit: float | None = None,
    ) -> None:
        self._group = group
        self._clock = clock
        self._lanes_of = lanes_of
        self._middlewares = middlewares
        self._contexts = contexts
        self._telemetry = telemetry
        # Of handlers that state none.
        self._time_limit = time_limit
        self._spaces: SpaceNumbers = {}
        self._by_topic: Mapping[str, Route] = {}
        #: The handlers of the topics that are consumed, without retry topics.
        self.handlers: Mapping[str, Handler] = {}
        #: Topics that came up while the consumer ran. On the poll thread.
        self.new: set[str] = set()
        #: One for each handler that has a topic: its routes share it. On the poll thread.
        self.token_buckets: list[TokenBucket] = []

    def __getitem__(self, topic: str) -> Route:
        return self._by_topic[topic]

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_topic)

    def __len__(self) -> int:
        return len(self._by_topic)

    @property
    def topics(self) -> list[str]:
        """The topics to subscribe to, retry topics included."""
        return [name for name, route in self._by_topic.items() if (route.source or name) in self.handlers]

    def begins_at_first(self, topic: str) -> bool:
        """Tell whether a topic that the group has no offset of is read from its first message in any case.

        A retry topic is the group's own, and the messages that wait there count as done where they came from. A topic
        that came up while the consumer ran was written to before that was noticed. On the poll thread.
        """
        return self._by_topic[topic].source is not None or topic in self.new

    def add(self, topic: str, handler: Handler) -> None:
        """Have a handler take a topic, with its retry topics."""
        if topic not in self._by_topic:
            made = {topic: self._route(handler)}
            for name, delay in retry_topics(self._group, topic, handler.retry_delays).items():
                made[name] = self._retry_route(made[topic], topic, delay)
            self._by_topic = {**self._by_topic, **made}
        self.handlers = {**self.handlers, topic: handler}

    def let_go(self, topics: Collection[str]) -> None:
        """Consume these topics no more, nor their retry topics."""
        self.handlers = {topic: handler for topic, handler in self.handlers.items() if topic not in topics}

    def add_former_delays(self, existing: Iterable[str]) -> None:
        """Read the retry topics of delays that handlers have no more, so that what waits there is not forgotten."""
        existing = list(existing)
        for topic, handler in self.handlers.items():
            # A handler without delays reads its own topics alone: with the last one goes what waits for it.
            for name, delay in former_retry_topics(
                self._group, topic, existing if handler.retry_delays else ()
            ).items():
                if name not in self._by_topic:
                    route = self._retry_route(self._by_topic[topic], topic, delay)
                    self._by_topic = {**self._by_topic, name: route}

    def of_handler(self, handler: Handler) -> list[Route]:
        """Return the routes of a handler. Any thread."""
        return [route for route in self._by_topic.values() if route.handler is handler]

    def _route(self, handler: Handler) -> Route:
        lanes = self._lanes_of(handler)
        ordering = ordering_of(handler, len(lanes), self._spaces, batches=True)
        maker = ResultMaker.of(handler)
        invoke = wrap(handler, self._middlewares, self._contexts)
        limit = self._time_limit if handler.time_limit is None else handler.time_limit
        limit = None if limit == math.inf else limit
        if limit is not None and handler.kind is Kind.TASK:
            invoke = cancelled_after(limit, handler.name, invoke)
        invoke = self._traced(handler, invoke, maker)
        shares = next(iter(self.of_handler(handler)), None)
        route = Route(handler, ordering, invoke, lanes=lanes, results_by=maker, time_limit=limit, shares=shares)
        if shares is None:
            self.token_buckets.append(route.token_bucket)
        return route

    def _retry_route(self, shares: Route, topic: str, delay: float) -> Route:
        headers = RetryHeaders(delay, len(shares.handler.retry_delays))
        return Route(
            shares.handler,
            shares.ordering,
            shares.invoke,
            lanes=shares.lanes,
            time_limit=shares.time_limit,
            source=topic,
            shares=shares,
            not_before=partial(self._due_at, headers),
            retried=headers.rounds,
        )

    def _due_at(self, headers: RetryHeaders, record: Record) -> float:
        wait = headers.wait(record, self._clock.time())
        return self._clock.monotonic() + wait if wait > 0 else 0.0

    def _traced(self, handler: Handler, invoke: Invoke, maker: ResultMaker) -> Invoke:
        if self._telemetry is None:
            return invoke
        maker.trace = self._telemetry.publishing
        is_async = handler.kind is Kind.TASK
        # Results are sent within the span. Where there is none, whoever called the handler makes them.
        within = with_results(invoke, maker, is_async=is_async)
        return self._telemetry.processing.around(invoke, within=within, batches=handler.batch > 1, is_async=is_async)
