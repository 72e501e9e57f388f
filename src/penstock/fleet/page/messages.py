"""One message as it is in Kafka, for whoever switched that on: its key, headers and value as text."""

from __future__ import annotations

import time
from typing import Any

from confluent_kafka import KafkaError, KafkaException

from penstock.clients.kafka_errors import code_of, reason
from penstock.clients.reading import NotReadInTimeError, PartitionReader
from penstock.errors import BrokerConnectionError, PenstockError
from penstock.message import readable_headers, timestamp_of
from penstock.options import ClientConfig

#: The client wants one; nothing is asked of it.
_GROUP = "penstock-page"
#: Seconds that it may take.
_READ_BUDGET_S = 6.0
#: Characters that are shown of a key, a header and a value, and how many headers.
_MOST_KEY = 500
_MOST_VALUE = 4_000
_MOST_HEADERS = 50


def read_message(bootstrap_servers: str, config: ClientConfig, topic: str, partition: int, offset: int) -> Any:
    """Return a message as JSON has it.

    Raises:
        PenstockError: there is none at that offset, or it may not be read.
        BrokerConnectionError: no broker answered in time.
    """
    place = f"{topic}:{partition}@{offset}"
    isolation = config.get("isolation.level", "read_committed")
    with PartitionReader(bootstrap_servers, config, _GROUP, isolation=isolation) as reader:
        deadline = time.monotonic() + _READ_BUDGET_S
        try:
            # A client that reads a topic which it may not see, or that is not there, says nothing in this time.
            reader.bounds(topic, [partition], _READ_BUDGET_S)
            message = reader.record_at((topic, partition), offset, deadline - time.monotonic())
        except KafkaException as error:
            is_hidden = code_of(error) == KafkaError._UNKNOWN_PARTITION  # noqa: SLF001 - the library's public constants look so
            why = "there is no such partition, or this user may not see it" if is_hidden else reason(error)
            raise BrokerConnectionError(f"{place} did not come: {reader.trouble or why}") from error
        except NotReadInTimeError as error:
            raise BrokerConnectionError(f"{place} did not come: {reader.trouble or 'no answer'}") from error
    if message is None:
        raise PenstockError(f"there is no message at {place}: it was deleted, or is not committed")
    return _shown(message)


def _shown(message: Any) -> dict[str, Any]:
    value = message.value()
    return {
        "key": _text(message.key(), _MOST_KEY),
        "value": _text(value, _MOST_VALUE),
        "bytes": 0 if value is None else len(value),
        "timestamp": timestamp_of(message),
        "headers": [[name, _text(content, _MOST_KEY)] for name, content in readable_headers(message)[:_MOST_HEADERS]],
    }


def _text(content: bytes | str | None, most: int) -> str | None:
    if content is None:
        return None
    text = content if isinstance(content, str) else content[: 4 * most].decode(errors="backslashreplace")
    return text[:most] + ("…" if len(text) > most else "")
