"""How a dead letter is printed.

What a terminal might obey is escaped. Key, value, headers' contents and the exception's text are printed only where
they are asked for; of the stack its places alone are: file, line and function.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

from penstock.cli.output import printable
from penstock.dead_letters.headers import strip
from penstock.dead_letters.kinds import Kind
from penstock.dead_letters.reader import DeadLetter

#: Stands for what the headers do not tell.
UNKNOWN = "?"

#: A place in a stack: Python's, and Java's of Spring's dead letters. All else in a stack may be text of an exception.
_PLACE = re.compile(r'\s*File "[^"]*", line \d+(, in \S+)?|\s+at [\w.$/<>@-]+\([\w.$: ]*\)')


def lines(letter: DeadLetter, *, payload: bool) -> Iterator[str]:
    """Return what there is to tell of a dead letter, line by line; keys, values and texts only with its payload."""
    origin = letter.origin
    yield f"{letter.topic} {letter.partition}:{letter.offset}  {time_text(letter.timestamp_ms)}"
    if origin is None:
        yield "  from       its headers tell nothing"
    else:
        partition = UNKNOWN if origin.partition is None else origin.partition
        offset = UNKNOWN if origin.offset is None else origin.offset
        yield f"  from       {origin.topic or UNKNOWN} {partition}:{offset}"
        yield f"  group      {printable(origin.group or UNKNOWN)}"
        yield f"  tries      {UNKNOWN if origin.attempts is None else origin.attempts}"
        yield f"  exception  {printable(origin.exception or UNKNOWN)}"
        yield from _block("message", (origin.message or "") if payload else "(shown with --payload)")
    yield from _own_headers(letter, payload=payload)
    if origin is not None and origin.stack is not None:
        yield "  stack"
        stack = origin.stack.splitlines()
        yield from (f"    {printable(line)}" for line in stack if payload or _PLACE.fullmatch(line))
    if payload:
        yield f"  key        {content_text(letter.key)}"
        yield f"  value      {content_text(letter.value)}"


def letter_as_json(letter: DeadLetter, *, payload: bool) -> dict[str, Any]:
    """Return a dead letter as JSON has it; keys, values and texts only with its payload."""
    origin, own = letter.origin, strip(letter.headers)
    found: dict[str, Any] = {
        "topic": letter.topic,
        "partition": letter.partition,
        "offset": letter.offset,
        "timestamp_ms": letter.timestamp_ms,
        "original_topic": origin and origin.topic,
        "original_partition": origin and origin.partition,
        "original_offset": origin and origin.offset,
        "group": origin and origin.group,
        "tries": origin and origin.attempts,
        "exception": origin and origin.exception,
        "headers": [name for name, _ in own],
    }
    if payload:
        found |= {
            "message": origin and origin.message,
            "stack": origin and origin.stack,
            "key": content_text(letter.key),
            "value": content_text(letter.value),
            "header_values": [content_text(value) for _, value in own],
        }
    return found


def kind_row(name: str, kind: Kind) -> tuple[str, ...]:
    """Return the row of `penstock dlq ls` for what is alike in the topic of that name."""
    when = (time_text(kind.first_ms), time_text(kind.last_ms))
    replayed = UNKNOWN if kind.replayed is None else str(kind.replayed)
    return (str(kind.count), replayed, name, kind.origin, printable(kind.exception), *when)


def _block(name: str, text: str) -> Iterator[str]:
    """Print a text of several lines below its name's first."""
    for number, line in enumerate(text.splitlines()):
        yield f"  {'' if number else name:<11}{printable(line)}"


def _own_headers(letter: DeadLetter, *, payload: bool) -> Iterator[str]:
    own = strip(letter.headers)
    if own:
        yield "  headers" if payload else "  headers    (their values are shown with --payload)"
    for name, value in own:
        yield f"    {printable(name)}" + (f"  {content_text(value)}" if payload else "")


def content_text(value: str | bytes | None) -> str:
    """Return bytes as text where they are text, else as hexadecimal digits; what a terminal might obey is escaped."""
    if value is None:
        return "(null)"
    if isinstance(value, str):
        return printable(value)
    try:
        return printable(value.decode())
    except UnicodeDecodeError:
        return f"0x{value.hex()}"


def time_text(milliseconds: int) -> str:
    """Return a time of the epoch in UTC, to the second; "?" for what is none."""
    if milliseconds < 0:
        return UNKNOWN
    try:
        return f"{datetime.fromtimestamp(milliseconds / 1000, UTC):%Y-%m-%d %H:%M:%S} UTC"
    except (ValueError, OverflowError, OSError):  # a producer may claim any time
        return UNKNOWN
