"""Trace context in record headers: `traceparent` and `tracestate` (W3C Trace Context, level 1).

Headers come from anybody: what does not follow the form is treated as absent. The SDK's own propagator would write
parts of a malformed `tracestate` to the log.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from typing import Final, TypeVar

from opentelemetry.context import Context
from opentelemetry.trace import SpanContext, TraceFlags, TraceState, format_span_id, format_trace_id, get_current_span

from penstock.message import Message, headers_of

TRACEPARENT: Final = "traceparent"
TRACESTATE: Final = "tracestate"

#: Characters of a `traceparent` that are looked at; version 00 has 55, later ones may append.
_MAX_PARENT_CHARS = 512
#: Characters and members of a `tracestate` that are carried on (W3C asks for at least 512, and for 32).
_MAX_STATE_CHARS = 8192
_MAX_STATE_MEMBERS = 32

_PARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.DOTALL)
_MEMBER = re.compile(
    r"([a-z][a-z0-9_\-*/]{0,255}|[a-z0-9][a-z0-9_\-*/]{0,240}@[a-z][a-z0-9_\-*/]{0,13})"
    r"=([\x20-\x2b\x2d-\x3c\x3e-\x7e]{0,255}[\x21-\x2b\x2d-\x3c\x3e-\x7e])"
)
_NO_STATE = TraceState()
#: The ends of flags whose lowest bit is set. Blanks and what later versions append are looked at more closely.
_SAMPLED = frozenset({*"13579bdf \t", *(bytes([byte]) for byte in b"13579bdf \t")})

HeaderT = TypeVar("HeaderT", bound=str | bytes | None)


def context_of(message: Message) -> SpanContext | None:
    """Return the producer's context of a message, or None where it carries none that can be read."""
    try:
        headers = message.headers
    except UnicodeDecodeError:
        # A header's name may be any bytes on the wire; the client then gives none of them.
        return None
    return extract(headers)


def is_sender_sampled(message: Message) -> bool:
    """Return whether the producer's context of a message is sampled."""
    try:
        headers = headers_of(message._record)  # noqa: SLF001 - asked of every message: `headers` would copy them
    except UnicodeDecodeError:
        return False
    return False if headers is None else sampled_context(headers) is not None


def extract(headers: Iterable[tuple[str, str | bytes | None]]) -> SpanContext | None:
    """Return the context that headers carry, or None where there is none or it is malformed. Never raises.

    A name that stands more than once counts with its last value, as in Kafka's `lastHeader`. A malformed `tracestate`
    is dropped and the `traceparent` beside it still counts, as W3C asks.
    """
    parent: str | bytes | None = None
    state: str | bytes | None = None
    for name, content in headers:
        if name == TRACEPARENT:
            parent = content
        elif name == TRACESTATE:
            state = content
    if parent is None:
        return None
    found = _PARENT.fullmatch(_text(parent, _MAX_PARENT_CHARS))
    if found is None:
        return None
    version, trace_id, span_id, flags, rest = found.groups()
    if version == "ff" or (version == "00" and rest is not None):
        return None
    context = SpanContext(
        int(trace_id, 16),
        int(span_id, 16),
        is_remote=True,
        trace_flags=TraceFlags(int(flags, 16)),
        trace_state=_NO_STATE if state is None else _trace_state(_text(state, _MAX_STATE_CHARS)),
    )
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
    span = get_current_span(context).get_span_context()
    if not span.is_valid:
        return list(headers)
    kept: list[tuple[str, HeaderT | bytes]] = [pair for pair in headers if pair[0] not in (TRACEPARENT, TRACESTATE)]
    flags = span.trace_flags & 0xFF
    parent = f"00-{format_trace_id(span.trace_id)}-{format_span_id(span.span_id)}-{flags:02x}"
    kept.append((TRACEPARENT, parent.encode()))
    if span.trace_state:
        kept.append((TRACESTATE, span.trace_state.to_header().encode()))
    return kept


def _text(content: object, limit: int) -> str:
    """Return the content as text, or nothing where it is too long or neither text nor bytes; the forms are ASCII."""
    if isinstance(content, str):
        text = content
    elif isinstance(content, bytes):
        text = content.decode("latin-1")
    else:
        return ""
    return text.strip(" \t") if len(text) <= limit else ""


def _trace_state(text: str) -> TraceState:
    members = [member for piece in text.split(",") if (member := piece.strip(" \t"))]
    pairs: dict[str, str] = {}
    if len(members) > _MAX_STATE_MEMBERS:
        return _NO_STATE
    for member in members:
        found = _MEMBER.fullmatch(member)
        if found is None or found[1] in pairs:
            return _NO_STATE
        pairs[found[1]] = found[2]
    return TraceState(list(pairs.items())) if pairs else _NO_STATE
