"""`TraceIds`: puts the ids of the current span into log records, so that a log line leads to its trace and back."""

from __future__ import annotations

import logging

from opentelemetry.trace import format_span_id, format_trace_id, get_current_span


class TraceIds(logging.Filter):
    """A filter for a log handler; it lets all records pass. Any thread.

    Records get `trace_id` and `span_id`, as hex, of the span that is current where they are made: within a handler of
    an app, that of its message. They are empty elsewhere, and where no span was made.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """Add the ids."""
        context = get_current_span().get_span_context()
        record.trace_id = format_trace_id(context.trace_id) if context.is_valid else ""
        record.span_id = format_span_id(context.span_id) if context.is_valid else ""
        return True
