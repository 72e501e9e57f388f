"""Kafka's error codes for the clients in memory, under names without the client library's underscore."""

from __future__ import annotations

from confluent_kafka import KafkaError

# The client library names its local errors with a leading underscore.
AUTO_OFFSET_RESET: int = KafkaError._AUTO_OFFSET_RESET  # noqa: SLF001 - as above
CONFLICT: int = KafkaError._CONFLICT  # noqa: SLF001 - as above
FATAL: int = KafkaError._FATAL  # noqa: SLF001 - as above
INVALID_ARGUMENT: int = KafkaError._INVALID_ARG  # noqa: SLF001 - as above
MAX_POLL_EXCEEDED: int = KafkaError._MAX_POLL_EXCEEDED  # noqa: SLF001 - as above
NO_OFFSET: int = KafkaError._NO_OFFSET  # noqa: SLF001 - as above
STATE: int = KafkaError._STATE  # noqa: SLF001 - as above
PURGE_QUEUE: int = KafkaError._PURGE_QUEUE  # noqa: SLF001 - as above
QUEUE_FULL: int = KafkaError._QUEUE_FULL  # noqa: SLF001 - as above
TIMED_OUT: int = KafkaError._TIMED_OUT  # noqa: SLF001 - as above
TRANSPORT: int = KafkaError._TRANSPORT  # noqa: SLF001 - as above
UNKNOWN_PARTITION: int = KafkaError._UNKNOWN_PARTITION  # noqa: SLF001 - as above

# The broker's errors.
ILLEGAL_GENERATION: int = KafkaError.ILLEGAL_GENERATION
METADATA_TOO_LARGE: int = KafkaError.OFFSET_METADATA_TOO_LARGE
OFFSET_OUT_OF_RANGE: int = KafkaError.OFFSET_OUT_OF_RANGE
UNKNOWN_MEMBER_ID: int = KafkaError.UNKNOWN_MEMBER_ID
UNKNOWN_TOPIC_OR_PARTITION: int = KafkaError.UNKNOWN_TOPIC_OR_PART

#: The client's value for "no offset", and the logical offsets.
INVALID = -1001
BEGINNING = -2
END = -1
