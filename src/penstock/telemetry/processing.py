"""The span around a handler: `process {topic}`, current while the handler runs, linked to the sender's span.

A message begins a new trace, linked to its producer's, which ended long ago (OpenTelemetry messaging conventions). The
span belongs to the thread or task of the handler, so other messages do not see it. Exceptions of exporters, samplers
and span processors are logged and suppressed; those of the handler pass unchanged.
"""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable, Sequence
from contextvars import Token
from random import random
from typing import Any

from opentelemetry import context as context_api
from opentelemetry.context import Context
from opentelemetry.trace import Link, Span, SpanKind, set_span_in_context
from opentelemetry.util.types import AttributeValue

from penstock.errors import raised
from penstock.message import Message, headers_of
from penstock.telemetry import names
from penstock.telemetry.propagation import context_of, sampled_context
from penstock.telemetry.settings import Telemetry, by_chance
from penstock.telemetry.suppressed_errors import SuppressedErrors

#: A handler of a message or a list of messages, with its middlewares.
Invoke = Callable[[Any], Any]

_Attributes = dict[str, AttributeValue]
#: A handler's call under way: span, its context, the token to leave it, the start, the metric's attributes.
_Running = tuple[Span, Context, Token[Context], float, _Attributes]
#: Returns, for a handler's argument: its first message, the span's attributes, and the links.
_Describe = Callable[[Any], tuple[Message, _Attributes, Sequence[Link]]]

#: An empty context: a span that starts in it is the root of a new trace.
_ROOT = Context()

#: Most characters of a key and of a stack trace.
_MAX_KEY_CHARS = 256
_MAX_STACK_CHARS = 8192


class Processing:
    """Wraps the handlers of a consumer group. Safe for threads and for tasks of an event loop."""

    def __init__(
        self, telemetry: Telemetry, group: str, suppressed: SuppressedErrors, clock: Callable[[], float]
    ) -> None:
        self._tracer = telemetry.tracer()
        self._record_keys = telemetry.record_keys
        self._ratio = telemetry.sample_ratio
        self._group = group
        self._suppressed = suppressed
        self._clock = clock
        self._durations = telemetry.meter().create_histogram(
            "messaging.process.duration",
            "s",
            "Duration of a call of a handler.",
            explicit_bucket_boundaries_advisory=names.DURATION_BOUNDARIES_S,
        )

    def around(
        self, invoke: Invoke, *, within: Invoke | None = None, batches: bool = False, is_async: bool = False
    ) -> Invoke:
        """Return a function that calls `invoke`, or an `async def` that awaits it, within a span of its messages.

        If there is a span, `within` is called instead of `invoke`: it may do more while the span is current. Messages
        that are not sampled go to `invoke` directly and cost only a look at their headers.
        """
        describe: _Describe = self._of_batch if batches else self._of_message
        traced = (self._async if is_async else self._sync)(within or invoke, describe)
        if self._ratio < 1:
            # A message whose sender was sampled is always traced.
            traced = (_sampling_batches if batches else _sampling)(self._ratio, traced, invoke)
        return functools.wraps(invoke)(traced)

    def _sync(self, invoke: Invoke, describe: _Describe) -> Invoke:
        begin, finish = self._begin, self._finish

        def traced(given: Any) -> object:
            running = begin(describe, given)
            try:
                answer = invoke(given)
            except:
                finish(running, raised())
                raise
            finish(running, None)
            return answer

        return traced

    def _async(self, invoke: Invoke, describe: _Describe) -> Invoke:
        begin, finish = self._begin, self._finish

        async def traced(given: Any) -> object:
            running = begin(describe, given)
            try:
                answer = await invoke(given)
            except:
                finish(running, raised())
                raise
            finish(running, None)
            return answer

        return traced

    def _begin(self, describe: _Describe, given: Any) -> _Running | None:
        # No `with self._suppressed` here and in `_finish`, for speed: they run for each message.
        try:
            first, attributes, links = describe(given)
            topic = first.topic
            span = self._tracer.start_span(f"process {topic}", _ROOT, SpanKind.CONSUMER, attributes, links)
            # Within the current context, which may have baggage of a middleware.
            context = set_span_in_context(span)
            return span, context, context_api.attach(context), self._clock(), self._measured(topic)
        except Exception as error:  # noqa: BLE001 - a defect of telemetry must not become a failure of the message
            self._suppressed.log(error)
            return None

    def _finish(self, running: _Running | None, raised_error: BaseException | None) -> None:
        """Leave the context, measure, and end the span."""
        if running is None:
            return
        span, context, token, since, measured = running
        context_api.detach(token)
        try:
            seconds = self._clock() - since
            if raised_error is not None:
                measured = {**measured, names.ERROR_TYPE: _note_error(span, raised_error)}
            # An exemplar points to the span in the context.
            self._durations.record(seconds, measured, context)
        except Exception as error:  # noqa: BLE001 - as in _begin
            self._suppressed.log(error)
        try:
            span.end()  # even if measuring failed: otherwise it would never be exported
        except Exception as error:  # noqa: BLE001 - as in _begin
            self._suppressed.log(error)

    def _of_message(self, message: Message) -> tuple[Message, _Attributes, Sequence[Link]]:
        attributes = self._of_partition(message)
        attributes["messaging.kafka.offset"] = message.offset
        if message.value is None:
            attributes["messaging.kafka.message.tombstone"] = True
        if self._record_keys and (key := message.key) is not None:
            attributes["messaging.kafka.message.key"] = _key_text(key)
        sender = context_of(message)
        return message, attributes, () if sender is None else (Link(sender),)

    def _of_batch(self, messages: Sequence[Message]) -> tuple[Message, _Attributes, Sequence[Link]]:
        first, partition = messages[0], messages[0].partition
        attributes = self._of_partition(first)
        if any(message.partition != partition for message in messages):
            del attributes[names.DESTINATION_PARTITION_ID]
        attributes[names.BATCH_MESSAGE_COUNT] = len(messages)
        # By ids: a context with a trace state cannot be hashed.
        senders = {
            (sender.trace_id, sender.span_id): Link(sender)
            for message in messages
            if (sender := context_of(message)) is not None
        }
        return first, attributes, list(senders.values())

    def _measured(self, topic: str) -> _Attributes:
        """Return the attributes of the metric, without the partition: a handler's time does not depend on it."""
        return names.attributes("process", topic=topic) | {names.CONSUMER_GROUP_NAME: self._group}

    def _of_partition(self, message: Message) -> _Attributes:
        """Return the common attributes of spans of a message's partition."""
        of_process = {names.OPERATION_TYPE: "process", names.DESTINATION_PARTITION_ID: str(message.partition)}
        return self._measured(message.topic) | of_process


def _sampling(ratio: float, traced: Invoke, untraced: Invoke) -> Invoke:
    """Return a function that calls `traced` at random and for messages whose sender was sampled, otherwise `untraced`.

    For an `async def` it returns the awaitable.
    """

    def sampling(message: Message) -> object:
        # `by_chance`, inlined: this runs for every message.
        return traced(message) if random() < ratio or _is_sender_sampled(message) else untraced(message)  # noqa: S311 - it samples, and keeps no secret

    return sampling


def _sampling_batches(ratio: float, traced: Invoke, untraced: Invoke) -> Invoke:
    """Return the same for a handler of batches: one sampled message is enough."""

    def sampling(messages: Sequence[Message]) -> object:
        return traced(messages) if by_chance(ratio) or any(map(_is_sender_sampled, messages)) else untraced(messages)

    return sampling


def _is_sender_sampled(message: Message) -> bool:
    try:
        headers = headers_of(message._record)  # noqa: SLF001 - `headers` would copy them
    except UnicodeDecodeError:
        return False
    return headers is not None and sampled_context(headers) is not None


def _note_error(span: Span, error: BaseException) -> str:
    """Mark the span as failed, without the exception's text, which may quote the payload; return the error type."""
    kind = names.mark_failed(span, error)
    if span.is_recording():
        stack = "".join(traceback.format_tb(error.__traceback__))[-_MAX_STACK_CHARS:]
        span.add_event("exception", {"exception.type": kind, "exception.stacktrace": stack})
    return kind


def _key_text(key: bytes) -> str:
    return key[:_MAX_KEY_CHARS].decode("utf-8", "backslashreplace")[:_MAX_KEY_CHARS]
