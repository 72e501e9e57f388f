"""One message as it is in Kafka, for whoever switched that on: its key, headers and value as text."""

from __future__ import annotations

from typing import Any

from penstock.clients.reading import read_record
from penstock.message import readable_headers, timestamp_of
from penstock.options import ClientConfig

#: Seconds that it may take.
_READ_BUDGET_S = 6.0
#: Characters that are shown of a key, a header and a value, and how many headers.
_MOST_KEY = 500
_MOST_VALUE = 4_000
_MOST_HEADERS = 50


def read_message(bootstrap_servers: str, config: ClientConfig, topic: str, partition: int, offset: int) -> Any:
    """Return a message as JSON has it. Raises as `read_record`."""
    return _shown(read_record(bootstrap_servers, config, (topic, partition), offset, _READ_BUDGET_S))


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
