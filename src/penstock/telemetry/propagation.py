"""Trace context in record headers: `traceparent` and `tracestate` (W3C Trace Context), by OpenTelemetry's propagator.

Headers are untrusted. The propagator ignores a malformed `traceparent`, but writes parts of a malformed `tracestate` to
the log: it does not get such a one.
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

#: Most characters of each header, and most members of a `tracestate` (W3C requires 512 and 32).
_MAX_CHARS = 512
_MAX_MEMBERS = 32
_MEMBER = re.compile(
    r"([a-z][a-z0-9_\-*/]{0,255}|[a-z0-9][a-z0-9_\-*/]{0,240}@[a-z][a-z0-9_\-*/]{0,13})"
    r"=[\x20-\x2b\x2d-\x3c\x3e-\x7e]{0,255}[\x21-\x2b\x2d-\x3c\x3e-\x7e]"
)
#: Last characters of a header that may be sampled: flags with the lowest bit set, or blanks, which need a closer look.
_SAMPLED = frozenset({*"13579bdf \t", *(bytes([byte]) for byte in b"13579bdf \t")})

_PROPAGATOR = TraceContextTextMapPropagator()
_ROOT = Context()

HeaderT = TypeVar("HeaderT", bound=str | bytes | None)


def context_of(message: Message) -> SpanContext | None:
    """Return the producer's context of a message, or None if it has no readable one."""
    return extract(readable_headers(message._record))  # noqa: SLF001 - for every message: `headers` would copy them


def extract(headers: Iterable[tuple[str, str | bytes | None]]) -> SpanContext | None:
    """Return the context of headers, or None if it is absent or malformed. Never raises.

    Of repeated names the last counts, as in Kafka's `lastHeader`. A malformed `tracestate` is dropped, and the
    `traceparent` still counts, as W3C requires.
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
    """Return the context of headers if it is sampled. Its last character decides quickly."""
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

    It replaces an existing context, which belongs to another producer. Without a span the headers are returned
    unchanged.
    """
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier, context)
    if not carrier:
        return list(headers)
    kept: list[tuple[str, HeaderT | bytes]] = [pair for pair in headers if pair[0] not in (TRACEPARENT, TRACESTATE)]
    return kept + [(name, content.encode()) for name, content in carrier.items()]


class TraceIds(logging.Filter):
    """A log filter that adds the ids of the current span to records and lets all pass. Any thread.

    Records get `trace_id` and `span_id` in hex. Within a handler, these belong to the span of its message. Without a
    span they are empty.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """Add the ids."""
        context = get_current_span().get_span_context()
        record.trace_id = format_trace_id(context.trace_id) if context.is_valid else ""
        record.span_id = format_span_id(context.span_id) if context.is_valid else ""
        return True


def _text(content: object) -> str:
    """Return the content as text (both forms are ASCII); empty if it is too long, or neither text nor bytes."""
    text = content.decode("latin-1") if isinstance(content, bytes) else content
    return text if isinstance(text, str) and len(text) <= _MAX_CHARS else ""
