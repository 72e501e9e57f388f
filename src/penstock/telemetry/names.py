"""Names of attributes, from OpenTelemetry's messaging conventions (1.44) and our own, and common parts of spans.

The Python package of the conventions has these names in a private module. Names that are used more than once are here.
"""

from __future__ import annotations

from typing import Final

from opentelemetry.trace import Span, StatusCode
from opentelemetry.util.types import AttributeValue

from penstock.errors import class_name

#: The instrumentation scope of all spans and metrics.
SCOPE: Final = "penstock"

OPERATION_TYPE: Final = "messaging.operation.type"
DESTINATION_NAME: Final = "messaging.destination.name"
#: A string, though Kafka's partitions are numbers.
DESTINATION_PARTITION_ID: Final = "messaging.destination.partition.id"
CONSUMER_GROUP_NAME: Final = "messaging.consumer.group.name"
BATCH_MESSAGE_COUNT: Final = "messaging.batch.message_count"
ERROR_TYPE: Final = "error.type"
#: Prefix of a transaction store's topics.
STORE_PREFIX: Final = "penstock.transactions.prefix"
#: Name of a Spark query.
SPARK_QUERY: Final = "penstock.spark.query"

#: Bucket boundaries in seconds, as the conventions require for both histograms of durations.
DURATION_BOUNDARIES_S: Final = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)


def attributes(operation: str, kind: str | None = None, topic: str | None = None) -> dict[str, AttributeValue]:
    """Return the common attributes of spans (with a `kind`) and metrics for an operation, optionally on a topic."""
    found: dict[str, AttributeValue] = {"messaging.system": "kafka", "messaging.operation.name": operation}
    if kind is not None:
        found[OPERATION_TYPE] = kind
    if topic is not None:
        found[DESTINATION_NAME] = topic
    return found


def mark_failed(span: Span, error: BaseException) -> str:
    """Mark a span as failed with the type of an error, not its text, which may quote the payload; return the type."""
    kind = class_name(error)
    span.set_attribute(ERROR_TYPE, kind)
    span.set_status(StatusCode.ERROR)
    return kind
