"""Dead letters as the engine writes them, made by hand."""

from __future__ import annotations

from collections.abc import Sequence

from kafka_tools import produce
from penstock.dead_letters.headers import DeadLetterFormat, DeadLetterOrigin, HeaderList, write
from penstock.message import FixedRecord


def origin_headers(
    topic: str,
    *,
    partition: int = 0,
    offset: int = 0,
    exception: str = "builtins.ValueError",
    own: Sequence[tuple[str, bytes | None]] = (),
    letter_format: DeadLetterFormat = DeadLetterFormat.KAFKA,
) -> HeaderList:
    """Return the headers of a record that died."""
    record = FixedRecord(topic, partition, offset, None, None, tuple(own), 1_700_000_000_000)
    origin = DeadLetterOrigin(
        topic, partition, offset, "billing", 5, exception, "it \x1b[31mbroke", "Traceback:\n  at \x1b[2J once"
    )
    return write(letter_format, record, origin)


def put(
    bootstrap: str,
    topic: str,
    *,
    key: bytes | None = b"k",
    value: bytes | None = b"v",
    headers: HeaderList | None = None,
    partition: int = 0,
    count: int = 1,
) -> None:
    """Write dead letters; `%d` in the value becomes their number."""
    bodies = [value % number if value is not None and b"%d" in value else value for number in range(count)]
    produce(bootstrap, topic, [(key, body) for body in bodies], headers=headers or [], partition=partition)
