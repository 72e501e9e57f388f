"""The names of telemetry, of OpenTelemetry's messaging conventions (1.44) and penstock's own, and what all spans share.

The Python package of the conventions keeps these under a private name, so the ones in use stand here.
"""

from __future__ import annotations

from typing import Final

from opentelemetry.trace import Span, StatusCode
from opentelemetry.util.types import AttributeValue

from penstock.errors import class_name

#: The instrumentation scope of all spans and metrics.
SCOPE: Final = "penstock"

SYSTEM: Final = "messaging.system"
OPERATION_NAME: Final = "messaging.operation.name"
OPERATION_TYPE: Final = "messaging.operation.type"
DESTINATION_NAME: Final = "messaging.destination.name"
#: A string, though Kafka's partitions are numbers.
DESTINATION_PARTITION_ID: Final = "messaging.destination.partition.id"
CONSUMER_GROUP_NAME: Final = "messaging.consumer.group.name"
BATCH_MESSAGE_COUNT: Final = "messaging.batch.message_count"
KAFKA_OFFSET: Final = "messaging.kafka.offset"
KAFKA_MESSAGE_KEY: Final = "messaging.kafka.message.key"
KAFKA_MESSAGE_TOMBSTONE: Final = "messaging.kafka.message.tombstone"
ERROR_TYPE: Final = "error.type"
EXCEPTION_EVENT: Final = "exception"
EXCEPTION_TYPE: Final = "exception.type"
EXCEPTION_STACKTRACE: Final = "exception.stacktrace"

PROCESS_DURATION: Final = "messaging.process.duration"
OPERATION_DURATION: Final = "messaging.client.operation.duration"
CONSUMED_MESSAGES: Final = "messaging.client.consumed.messages"
SENT_MESSAGES: Final = "messaging.client.sent.messages"

#: How many partitions of a topic one commit named.
PARTITION_COUNT: Final = "penstock.partition.count"
PAUSE_REASON: Final = "penstock.pause.reason"
REBALANCE_KIND: Final = "penstock.rebalance.kind"
COMMIT_OUTCOME: Final = "penstock.commit.outcome"
#: Prefix of a transaction store's topics.
STORE_PREFIX: Final = "penstock.transactions.prefix"
#: COMMIT or ROLLBACK.
DECISION: Final = "penstock.transactions.decision"
#: What a transaction waits for.
HELD_BY: Final = "penstock.transactions.held_by"
#: Upper bound of a bucket of finish times, in seconds.
WITHIN_S: Final = "penstock.transactions.within_s"
#: Name of a Spark query.
SPARK_QUERY: Final = "penstock.spark.query"
#: A phase of a Spark query's batch, by Spark's name; `triggerExecution` is the whole.
SPARK_BATCH_ID: Final = "penstock.spark.batch.id"
SPARK_PHASE: Final = "penstock.spark.phase"
SPARK_BATCH_DURATION: Final = "penstock.spark.batch.duration"

#: Bucket boundaries, in seconds, that the conventions ask for in both histograms of durations.
DURATION_BOUNDARIES_S: Final = (0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)

#: Bucket boundaries, in seconds, for batches of Spark queries, which take longer than messages do.
BATCH_BOUNDARIES_S: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)

KAFKA: Final = "kafka"


def attributes(operation: str, kind: str | None = None, topic: str | None = None) -> dict[str, AttributeValue]:
    """Return the attributes that spans, which have a kind, and metrics share: of an operation, and on a topic."""
    found: dict[str, AttributeValue] = {SYSTEM: KAFKA, OPERATION_NAME: operation}
    if kind is not None:
        found[OPERATION_TYPE] = kind
    if topic is not None:
        found[DESTINATION_NAME] = topic
    return found


def mark_failed(span: Span, error: BaseException) -> str:
    """Mark a span as failed by the type of an error alone, for its text may quote the payload; return the type."""
    kind = class_name(error)
    span.set_attribute(ERROR_TYPE, kind)
    span.set_status(StatusCode.ERROR)
    return kind
