"""The span around a handler: `process {topic}`, current while the handler runs, linked to who sent the message.

A message begins a trace of its own, linked to its producer's, which ended long ago (OpenTelemetry messaging
conventions). The span lives on the thread or task that runs the handler, so no other message sees it. What an exporter,
a sampler or a span processor raises is logged and goes no further; what the handler raises passes through as it is.
"""

from __future__ import annotations

import functools
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextvars import Token
from random import random
from typing import Any, NamedTuple

from opentelemetry import context as context_api
from opentelemetry.context import Context
from opentelemetry.metrics import Histogram, Meter
from opentelemetry.trace import Link, Span, SpanKind, StatusCode, Tracer, set_span_in_context
from opentelemetry.util.types import AttributeValue

from penstock.errors import class_name, raised
from penstock.message import Message, headers_of
from penstock.telemetry import names
from penstock.telemetry.propagation import context_of, is_sender_sampled, sampled_context
from penstock.telemetry.settings import by_chance
from penstock.telemetry.suppressed_errors import SuppressedErrors

#: A handler, of a message or of a list of them, with what is around it.
Invoke = Callable[[Any], Any]

#: A context with nothing in it: a span that starts in it is the root of a new trace.
_ROOT = Context()

#: Seconds of handlers' times that are recorded together.
_TOGETHER_S = 0.1
#: Times that are kept at most to be recorded together: each keeps the span of its exemplar.
_MOST = 1_000
#: Characters kept of a key and of a stack trace.
_MAX_KEY_CHARS = 256
_MAX_STACK_CHARS = 8192


class _Running(NamedTuple):
    """A handler's call under way: its span in its context, how to leave that, since when, its metric's attributes."""

    span: Span
    context: Context
    token: Token[Context]
    since: float
    measured: dict[str, AttributeValue]


#: Begins the span of what a handler is given.
Start = Callable[[Any], _Running]


class Processing:
    """Wraps handlers. Thread-safe, and safe between the tasks of an event loop."""

    def __init__(
        self,
        tracer: Tracer,
        meter: Meter,
        group: str,
        *,
        record_keys: bool,
        ratio: float,
        clock: Callable[[], float],
        suppressed: SuppressedErrors,
    ) -> None:
        self._tracer = tracer
        self._record_keys = record_keys
        self._ratio = ratio
        self._clock = clock
        histogram = meter.create_histogram(
            names.PROCESS_DURATION,
            "s",
            "Duration of a call of a handler.",
            explicit_bucket_boundaries_advisory=names.DURATION_BOUNDARIES_S,
        )
        #: The times of handlers. Where only some are measured, each is far from the last: they are recorded together.
        self.durations = Durations(histogram, clock, every_s=_TOGETHER_S if ratio < 1 else 0.0)
        self._common: dict[str, AttributeValue] = {
            names.SYSTEM: names.KAFKA,
            names.OPERATION_NAME: "process",
            names.CONSUMER_GROUP_NAME: group,
        }
        # Made once for each topic and partition. Any thread adds, and two that add the same add equals: no lock.
        self._measured: dict[str, dict[str, AttributeValue]] = {}
        self._places: dict[tuple[str, int], dict[str, AttributeValue]] = {}
        self._suppressed = suppressed

    def around(
        self, invoke: Invoke, *, within: Invoke | None = None, batches: bool = False, is_async: bool = False
    ) -> Invoke:
        """Return a function that calls `invoke`, or an `async def` that awaits it, within a span of its messages.

        `within` is called instead of `invoke` where there is a span: what else is to be done while that is current.
        What chance leaves out goes to `invoke` itself, so that it costs a look at its headers and no more.
        """
        start: Start = self._start_batch if batches else self._start_one
        traced = (self._async if is_async else self._sync)(within or invoke, start)
        if self._ratio < 1:
            # What somebody sampled goes on with that trace, whatever chance says here.
            traced = (_sampling_batches if batches else _sampling)(self._ratio, traced, invoke)
        return functools.wraps(invoke)(traced)

    def _sync(self, invoke: Invoke, start: Start) -> Invoke:
        begin, finish = self._begin, self._finish

        def traced(given: Any) -> object:
            running = begin(start, given)
            try:
                answer = invoke(given)
            except:
                finish(running, raised())
                raise
            finish(running, None)
            return answer

        return traced

    def _async(self, invoke: Invoke, start: Start) -> Invoke:
        begin, finish = self._begin, self._finish

        async def traced(given: Any) -> object:
            running = begin(start, given)
            try:
                answer = await invoke(given)
            except:
                finish(running, raised())
                raise
            finish(running, None)
            return answer

        return traced

    def _begin(self, start: Start, given: Any) -> _Running | None:
        try:
            return start(given)
        except Exception:  # noqa: BLE001 - a defect of telemetry must not become a failure of the message
            self._suppressed.log()
            return None

    def _start_one(self, message: Message) -> _Running:
        topic = message.topic
        attributes = self._place(topic, message.partition).copy()
        attributes[names.KAFKA_OFFSET] = message.offset
        if message.value is None:
            attributes[names.KAFKA_MESSAGE_TOMBSTONE] = True
        if self._record_keys and (key := message.key) is not None:
            attributes[names.KAFKA_MESSAGE_KEY] = _key_text(key)
        sender = context_of(message)
        return self._start(topic, attributes, () if sender is None else (Link(sender),))

    def _start_batch(self, messages: Sequence[Message]) -> _Running:
        first = messages[0]
        topic, partition = first.topic, first.partition
        attributes = self._place(topic, partition).copy()
        if any(message.partition != partition for message in messages):
            del attributes[names.DESTINATION_PARTITION_ID]
        attributes[names.BATCH_MESSAGE_COUNT] = len(messages)
        # By their ids: a context that holds a trace state cannot be hashed.
        senders = {
            (sender.trace_id, sender.span_id): Link(sender)
            for message in messages
            if (sender := context_of(message)) is not None
        }
        return self._start(topic, attributes, list(senders.values()))

    def _start(self, topic: str, attributes: dict[str, AttributeValue], links: Sequence[Link]) -> _Running:
        span = self._tracer.start_span(f"process {topic}", _ROOT, SpanKind.CONSUMER, attributes, links)
        # In what is current here, as baggage that a middleware has set.
        context = set_span_in_context(span)
        token = context_api.attach(context)
        return _Running(span, context, token, self._clock(), self._measured[topic])

    def _place(self, topic: str, partition: int) -> dict[str, AttributeValue]:
        """Return the attributes that all messages of a partition share."""
        found = self._places.get((topic, partition))
        if found is None:
            # Without the partition: a handler's time does not hang on it, and each would cost a row of buckets.
            measured = self._measured.setdefault(topic, {**self._common, names.DESTINATION_NAME: topic})
            found = {
                **measured,
                names.OPERATION_TYPE: "process",
                names.DESTINATION_PARTITION_ID: str(partition),
            }
            self._places[topic, partition] = found
        return found

    def _finish(self, running: _Running | None, error: BaseException | None) -> None:
        """End the span and measure; leave the context whatever happens."""
        if running is None:
            return
        span, context, token, since, measured = running
        try:
            seconds = self._clock() - since
            if error is not None:
                measured = {**measured, names.ERROR_TYPE: _note_error(span, error)}
            self.durations.record(seconds, measured, context)
        except Exception:  # noqa: BLE001 - as in _begin
            self._suppressed.log()
        context_api.detach(token)
        try:
            span.end()
        except Exception:  # noqa: BLE001 - as in _begin
            self._suppressed.log()


def _sampling(ratio: float, traced: Invoke, untraced: Invoke) -> Invoke:
    """Return a function that calls `traced` by chance and for what its sender sampled, else `untraced`.

    Of an `async def` it returns what is to be awaited.
    """

    def sampling(message: Message) -> object:
        # Of every message: `by_chance` and `is_sender_sampled`, written out, for a call of each costs as much as it.
        if random() < ratio:  # noqa: S311 - it samples, and keeps no secret
            return traced(message)
        try:
            headers = headers_of(message._record)  # noqa: SLF001 - `headers` would copy them
        except UnicodeDecodeError:
            headers = None
        return untraced(message) if headers is None or sampled_context(headers) is None else traced(message)

    return sampling


def _sampling_batches(ratio: float, traced: Invoke, untraced: Invoke) -> Invoke:
    """Return the same for a handler of batches: one message that was sampled is enough."""

    def sampling(messages: Sequence[Message]) -> object:
        return traced(messages) if by_chance(ratio) or any(map(is_sender_sampled, messages)) else untraced(messages)

    return sampling


def _note_error(span: Span, error: BaseException) -> str:
    """Mark the span as failed, without the exception's text, which may quote the payload; return the error's type."""
    kind = class_name(error)
    if span.is_recording():
        span.set_attribute(names.ERROR_TYPE, kind)
        span.set_status(StatusCode.ERROR)
        stack = "".join(traceback.format_tb(error.__traceback__))[-_MAX_STACK_CHARS:]
        span.add_event(names.EXCEPTION_EVENT, {names.EXCEPTION_TYPE: kind, names.EXCEPTION_STACKTRACE: stack})
    return kind


def _key_text(key: bytes) -> str:
    return key[:_MAX_KEY_CHARS].decode("utf-8", "backslashreplace")[:_MAX_KEY_CHARS]


class Durations:
    """Records the times of a histogram, at most `every_s` seconds late while others come. Any thread.

    A call of OpenTelemetry's SDK takes 7 us in a loop, and four times that when other code ran since: what it needs is
    in no cache any more. So times that each come long after the last are recorded together.

    The first is recorded at once, and so is each that comes later than that after the last. What is kept when no more
    come is recorded by `flush`, which is to be called before metrics are read, and at the end.
    """

    def __init__(self, histogram: Histogram, clock: Callable[[], float], *, every_s: float) -> None:
        self._histogram = histogram
        self._clock = clock
        self._every_s = every_s
        self._lock = threading.Lock()
        # Under the lock.
        self._kept: list[tuple[float, Mapping[str, AttributeValue], Context]] = []
        # Written under the lock; who reads an old one keeps one more.
        self._next = float("-inf")

    def record(self, seconds: float, attributes: Mapping[str, AttributeValue], context: Context) -> None:
        """Record a time, now or soon; an exemplar of it points to the span in the context."""
        now = self._clock()
        with self._lock:
            self._kept.append((seconds, attributes, context))
            if now < self._next and len(self._kept) < _MOST:
                return
            self._next = now + self._every_s
        self.flush()

    def flush(self) -> None:
        """Record what is kept."""
        with self._lock:
            kept, self._kept = self._kept, []
        for seconds, attributes, context in kept:
            self._histogram.record(seconds, attributes, context)
