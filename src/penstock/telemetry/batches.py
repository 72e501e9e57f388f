"""The span of a batch of a Spark query: `process {query}`, current while its function runs on the driver.

It has no links: a batch has too many senders to name. So it has a span whatever part of the messages is sampled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from opentelemetry import context as context_api
from opentelemetry.context import Context
from opentelemetry.trace import Span, SpanKind, StatusCode, get_current_span, set_span_in_context
from opentelemetry.util.types import AttributeValue

from penstock.errors import class_name
from penstock.telemetry import names
from penstock.telemetry.settings import Telemetry
from penstock.telemetry.suppressed_errors import SuppressedErrors

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_suppressed = SuppressedErrors("of Spark")


class BatchSpans:
    """Makes the spans of one query's batches. Any thread may call it."""

    def __init__(self, telemetry: Telemetry, query: str) -> None:
        self._tracer = telemetry.tracer()
        self._query = query
        self._suppressed = SuppressedErrors(query)

    def around(self, function: Callable[[DataFrame, int], None]) -> Callable[[DataFrame, int], None]:
        """Return a function that gives `function` each batch within a span."""

        def traced(batch: DataFrame, batch_id: int) -> None:
            with self.of(batch_id):
                function(batch, batch_id)

        return traced

    @contextmanager
    def of(self, batch_id: int) -> Iterator[None]:
        """Be within the span of a batch. What is raised passes through, and marks the span by its type alone."""
        span = self._begin(batch_id)
        if span is None:
            yield
            return
        token = context_api.attach(set_span_in_context(span))
        try:
            yield
        except BaseException as error:
            with self._suppressed.instead_of_raising():
                span.set_attribute(names.ERROR_TYPE, class_name(error))
                span.set_status(StatusCode.ERROR)
            raise
        finally:
            context_api.detach(token)
            with self._suppressed.instead_of_raising():
                span.end()

    def _begin(self, batch_id: int) -> Span | None:
        attributes: dict[str, AttributeValue] = {
            names.SYSTEM: names.KAFKA,
            names.OPERATION_NAME: "process",
            names.OPERATION_TYPE: "process",
            names.SPARK_QUERY: self._query,
            names.SPARK_BATCH_ID: batch_id,
        }
        try:
            return self._tracer.start_span(f"process {self._query}", Context(), SpanKind.CONSUMER, attributes)
        except Exception:  # noqa: BLE001 - a defect of telemetry must not become a failure of the batch
            self._suppressed.log()
            return None


def count_messages(messages: int) -> None:
    """Note on the current span how many messages a batch had."""
    with _suppressed.instead_of_raising():
        get_current_span().set_attribute(names.BATCH_MESSAGE_COUNT, messages)
