"""Trace context in record headers: `traceparent` and `tracestate` (W3C Trace Context), by OpenTelemetry's propagator.

Headers come from anybody. The propagator treats a `traceparent` that does not follow the form as absent, but writes
parts of a malformed `tracestate` to the log: such a one is not given to it.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Collection, Iterable
from typing import Final, TypeVar

from opentelemetry.context import Context
from opentelemetry.trace import SpanContext, format_span_id, format_trace_id, get_current_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from penstock.message import Message, readable_headers

TRACEPARENT: Final = "traceparent"
TRACESTATE: Final = "tracestate"

#: Characters that are looked at of either, and members of a `tracestate` (W3C asks for 512 and 32).
_MAX_CHARS = 512
_MAX_MEMBERS = 32
_MEMBER = re.compile(
    r"([a-z][a-z0-9_\-*/]{0,255}|[a-z0-9][a-z0-9_\-*/]{0,240}@[a-z][a-z0-9_\-*/]{0,13})"
    r"=[\x20-\x2b\x2d-\x3c\x3e-\x7e]{0,255}[\x21-\x2b\x2d-\x3c\x3e-\x7e]"
)
#: The ends of flags whose lowest bit is set. Blanks and what later versions append are looked at more closely.
_SAMPLED = frozenset({*"13579bdf \t", *(bytes([byte]) for byte in b"13579bdf \t")})

_PROPAGATOR = TraceContextTextMapPropagator()
_ROOT = Context()

HeaderT = TypeVar("HeaderT", bound=str | bytes | None)


def context_of(message: Message) -> SpanContext | None:
    """Return the producer's context of a message, or None where it carries none that can be read."""
    return extract(readable_headers(message._record))  # noqa: SLF001 - asked of every message: `headers` would copy them


def extract(headers: Iterable[tuple[str, str | bytes | None]]) -> SpanContext | None:
    """Return the context that headers carry, or None where there is none or it is malformed. Never raises.

    A name that stands more than once counts with its last value, as in Kafka's `lastHeader`. A malformed `tracestate`
    is dropped and the `traceparent` beside it still counts, as W3C asks.
    """
    carrier = {name: _text(content) for name, content in headers if name in (TRACEPARENT, TRACESTATE)}
    if not carrier.get(TRACEPARENT):
        return None
    members = [piece.strip(" \t") for piece in carrier.get(TRACESTATE, "").split(",")]
    if len(members) > _MAX_MEMBERS or not all(_MEMBER.fullmatch(member) for member in members if member):
        del carrier[TRACESTATE]
    context = get_current_span(_PROPAGATOR.extract(carrier, _ROOT)).get_span_context()
    return context if context.is_valid else None


def sampled_context(headers: Collection[tuple[str, str | bytes | None]]) -> SpanContext | None:
    """Return the context that headers carry, where it is sampled, which its last character says."""
    last: str | bytes | None = None
    for name, content in headers:
        if name == TRACEPARENT:
            last = content
    if not last or last[-1:] not in _SAMPLED:
        return None
    context = extract(headers)
    return context if context is not None and context.trace_flags.sampled else None


def inject(headers: Iterable[tuple[str, HeaderT]], context: Context | None = None) -> list[tuple[str, HeaderT | bytes]]:
    """Return the headers with the trace context of the current span, or of the span in `context`.

    It takes the place of one they carried, which belongs to another producer. Where no span is current, the headers
    come back as they are.
    """
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier, context)
    if not carrier:
        return list(headers)
    kept: list[tuple[str, HeaderT | bytes]] = [pair for pair in headers if pair[0] not in (TRACEPARENT, TRACESTATE)]
    return kept + [(name, content.encode()) for name, content in carrier.items()]


class TraceIds(logging.Filter):
    """A filter for a log handler that puts the ids of the current span into records; it lets all pass. Any thread.

    Records get `trace_id` and `span_id`, as hex, of the span that is current where they are made: within a handler of
    an app, that of its message. They are empty elsewhere, and where no span was made.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """Add the ids."""
        context = get_current_span().get_span_context()
        record.trace_id = format_trace_id(context.trace_id) if context.is_valid else ""
        record.span_id = format_span_id(context.span_id) if context.is_valid else ""
        return True


def _text(content: object) -> str:
    """Return the content as text, or nothing where it is too long or neither text nor bytes; the forms are ASCII."""
    text = content.decode("latin-1") if isinstance(content, bytes) else content
    return text if isinstance(text, str) and len(text) <= _MAX_CHARS else ""
