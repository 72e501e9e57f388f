"""Texts that are printed everywhere: places (partition `orders:1`, message `orders:1@15`), counts, ages, names."""

from __future__ import annotations

import re

from penstock.errors import ConfigurationError

_PLACE = re.compile(r"(?:([\w.-]+):)?([0-9]{1,9})@([0-9]{1,18})", re.ASCII)
_WITHOUT_OFFSET = re.compile(r"[\w.-]+", re.ASCII)


def place_text(topic: str, partition: object, offset: object = None) -> str:
    """Return a place as text: `orders:1@15`, or `orders:1` without an offset."""
    return f"{topic}:{partition}" if offset is None else f"{topic}:{partition}@{offset}"


def place_of(text: str, topic: str | None = None) -> tuple[str, int, int]:
    """Return topic, partition and offset of a place.

    If `topic` is given, the text may omit it, as in `1@15`, and must not name another one. Raises `ConfigurationError`,
    which says what to write, for other texts.
    """
    found = _PLACE.fullmatch(text)
    named = found[1] or topic if found is not None else None
    if found is None or named is None or (topic is not None and named != topic):
        raise ConfigurationError(
            f"{text!r} is no place of a message; write {'TOPIC' if topic is None else topic}:PARTITION@OFFSET, as in "
            f"{topic or 'orders'}:0@17"
        )
    return named, int(found[2]), int(found[3])


def topic_or_place(text: str) -> tuple[str, tuple[int, int] | None]:
    """Return a topic, and partition and offset if the text names a message of it. Raises as `place_of`."""
    if _WITHOUT_OFFSET.fullmatch(text):
        return text, None
    topic, partition, offset = place_of(text)
    return topic, (partition, offset)


def counted(count: int, noun: str, plural: str | None = None) -> str:
    """Return a number with its noun: "1 member", "2 members"; `plural` is for other endings, as in "2 tries"."""
    return f"{count} {noun if count == 1 else plural or f'{noun}s'}"


def age_text(seconds: float) -> str:
    """Return an age in its two largest units."""
    # A difference of two clocks can be negative.
    minutes, hours, days = (max(0, int(seconds // unit)) for unit in (60, 3600, 86_400))
    if not minutes:
        return f"{seconds:.1f} s"
    if not hours:
        return f"{minutes} min {int(seconds % 60)} s"
    return f"{days} d {hours % 24} h" if days else f"{hours} h {minutes % 60} min"


def printable(text: str) -> str:
    """Return an untrusted text as one line with control characters escaped, for logs and terminals."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)
