"""`ConsumerTelemetry`: all that a consumer engine calls. The engine makes one at start and closes it at the end.

Nothing in it raises for telemetry's own reasons, waits, or leaves a span current on the caller's thread.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import TypeVar

from penstock.message import Message
from penstock.telemetry import names
from penstock.telemetry.client_spans import ClientSpans
from penstock.telemetry.gauge_registry import Observed, registry_of
from penstock.telemetry.processing import Processing
from penstock.telemetry.propagation import HeaderT
from penstock.telemetry.readings import METRICS, Reading
from penstock.telemetry.settings import Telemetry
from penstock.telemetry.suppressed_errors import SuppressedErrors

T = TypeVar("T")


class ConsumerTelemetry:
    """Spans and metrics of one consumer. All methods may be called from any thread.

    Args:
        telemetry: what the user gave.
        group: the consumer group.
        clock: seconds that only rise, for durations.
    """

    def __init__(self, telemetry: Telemetry, group: str, *, clock: Callable[[], float] = time.monotonic) -> None:
        tracer, meter, suppressed = telemetry.tracer(), telemetry.meter(), SuppressedErrors(group)
        self._group = group
        self._processing = Processing(
            tracer, meter, group, record_keys=telemetry.record_keys, clock=clock, suppressed=suppressed
        )
        self._client = ClientSpans(tracer, meter, group, suppressed)
        self._registry = registry_of(telemetry, METRICS, names.CONSUMER_GROUP_NAME)
        self._observed: Observed[Reading] | None = None

    def around(self, invoke: Callable[[Message], T]) -> Callable[[Message], T]:
        """Return a function that calls `invoke` within a span `process {topic}` of its message, and measures it.

        The span is a root linked to the producer's context, and current while `invoke` runs. What `invoke` returns or
        raises passes through. Wrap each handler once, not each message.
        """
        return self._processing.around(invoke)

    def around_batch(self, invoke: Callable[[list[Message]], T]) -> Callable[[list[Message]], T]:
        """Return as `around` does, for a handler of batches: one span, linked to each distinct producer's context.

        A batch holds at least one message, and messages of one topic only.
        """
        return self._processing.around_batch(invoke)

    def around_async(self, invoke: Callable[[Message], Awaitable[T]]) -> Callable[[Message], Awaitable[T]]:
        """Return as `around` does, for an `async def` handler; what is returned is an `async def` too."""
        return self._processing.around_async(invoke)

    def around_async_batch(
        self, invoke: Callable[[list[Message]], Awaitable[T]]
    ) -> Callable[[list[Message]], Awaitable[T]]:
        """Return as `around_batch` does, for an `async def` handler of batches."""
        return self._processing.around_async_batch(invoke)

    def polled(self, topic: str, messages: Mapping[int, int], duration_s: float) -> None:
        """Report the messages of one topic in one fetch: a span `poll {topic}` and the count of consumed messages.

        Args:
            topic: name of the topic.
            messages: how many messages of which partition; a partition without any is left out.
            duration_s: seconds the fetch took.
        """
        self._client.polled(topic, messages, duration_s)

    def committed(self, topic: str, partitions: int, error: str | None = None, duration_s: float | None = None) -> None:
        """Report the answer to a commit, one call for each topic in it: a span `commit {topic}`.

        Args:
            topic: name of the topic.
            partitions: how many of its partitions the commit named.
            error: the name of Kafka's error, as `REBALANCE_IN_PROGRESS`, or None when the group took it.
            duration_s: seconds from the request to the answer, or None where nobody measured.
        """
        self._client.committed(topic, partitions, error, duration_s)

    def sending(self, topic: str, headers: Iterable[tuple[str, HeaderT]]) -> list[tuple[str, HeaderT | bytes]]:
        """Report a message about to be sent (a span `send {topic}`); return its headers with that span's context.

        The context takes the place of one the headers carried, to which the span is linked.

        Args:
            topic: name of the topic it is sent to.
            headers: pairs of name and content.
        """
        return self._client.sending(topic, headers)

    def observe(self, read: Callable[[], Reading]) -> None:
        """Show the consumer in the metrics `penstock.*` until `close`; a second call replaces the first.

        Args:
            read: takes a reading. It is called on the metric readers' threads, once a collection, and must not wait
                for the poll thread.
        """
        self.close()
        self._observed = Observed(self._group, read)
        self._registry.add(self._observed)

    def close(self) -> None:
        """Show the consumer in the metrics no more and let go of `read`. May be called more than once."""
        observed, self._observed = self._observed, None
        if observed is not None:
            self._registry.remove(observed)


__all__ = ["ConsumerTelemetry"]
