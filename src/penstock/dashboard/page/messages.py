"""One message as it is in Kafka, for whoever switched that on: its key, headers and value as text."""

from __future__ import annotations

import time
from typing import Any

from confluent_kafka import KafkaError, TopicPartition

from penstock import clients
from penstock.clients.kafka_errors import reason
from penstock.errors import BrokerConnectionError, PenstockError
from penstock.options import ClientConfig

_SETTINGS = {
    "group.id": "penstock-page",  # the client wants one; nothing is asked of it
    "enable.auto.commit": False,
    "auto.offset.reset": "error",
    "enable.partition.eof": True,
}
_NOTHING_THERE = (KafkaError._PARTITION_EOF, KafkaError._AUTO_OFFSET_RESET)  # noqa: SLF001 - public codes begin so
#: Seconds that it may take.
_LIMIT_S = 6.0
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
    place = f"{topic}[{partition}]@{offset}"
    consumer = clients.consumer(bootstrap_servers, {**config, **_SETTINGS})
    try:
        consumer.assign([TopicPartition(topic, partition, offset)])
        deadline = time.monotonic() + _LIMIT_S
        trouble = ""
        while time.monotonic() < deadline:
            message = consumer.poll(0.2)
            if message is None:
                continue
            error = message.error()
            if error is None:
                if message.offset() != offset:
                    break
                return _shown(message)
            if error.code() in _NOTHING_THERE:
                break
            trouble = reason(error)
        else:
            raise BrokerConnectionError(f"{place} did not come in time: {trouble or 'no answer'}")
        raise PenstockError(f"there is no message at {place}: it was deleted, or is not committed")
    finally:
        consumer.close()


def _shown(message: Any) -> dict[str, Any]:
    value = message.value()
    return {
        "key": _text(message.key(), _MOST_KEY),
        "value": _text(value, _MOST_VALUE),
        "bytes": 0 if value is None else len(value),
        "timestamp": message.timestamp()[1],
        "headers": [[name, _text(content, _MOST_KEY)] for name, content in (message.headers() or ())[:_MOST_HEADERS]],
    }


def _text(content: bytes | str | None, most: int) -> str | None:
    if content is None:
        return None
    text = content if isinstance(content, str) else content[: 4 * most].decode(errors="backslashreplace")
    return text[:most] + ("…" if len(text) > most else "")
