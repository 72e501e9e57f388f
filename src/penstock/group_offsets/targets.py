"""What an operator writes to say where a group is to go, and in which partitions. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import Enum

from penstock.errors import ConfigurationError, TopicNotFoundError
from penstock.group_offsets.positions import Part

_MAX_OFFSET = (1 << 63) - 1
_NUMBER = re.compile(r"\d{1,19}", re.ASCII)
_SHIFT = re.compile(r"[+-]\d{1,19}", re.ASCII)
_NUMBERS = re.compile(r"(\d{1,6})(?:-(\d{1,6}))?", re.ASCII)
_MILLISECONDS = re.compile(r"(\d{1,19})ms", re.ASCII)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class Edge(Enum):
    """An end of a log."""

    EARLIEST = "earliest"
    LATEST = "latest"


@dataclass(frozen=True, slots=True)
class AtTime:
    """The first message that is so late, by its timestamp; the end of the log where none is."""

    ms: int


@dataclass(frozen=True, slots=True)
class AtOffset:
    """This offset."""

    offset: int


@dataclass(frozen=True, slots=True)
class Shift:
    """So many offsets on from the committed one, or back."""

    offsets: int


Target = Edge | AtTime | AtOffset | Shift


def target(text: str) -> Target:
    """Return where `--to` wants a group; `ConfigurationError` where it is none of what can be written there."""
    if text in {edge.value for edge in Edge}:
        return Edge(text)
    if _NUMBER.fullmatch(text) and int(text) <= _MAX_OFFSET:
        return AtOffset(int(text))
    if _SHIFT.fullmatch(text) and abs(int(text)) <= _MAX_OFFSET:
        return Shift(int(text))
    if (found := _MILLISECONDS.fullmatch(text)) and int(found[1]) <= _MAX_OFFSET:
        return AtTime(int(found[1]))
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise ConfigurationError(
            f"--to {text!r} is no place in a log; write earliest, latest, an offset as 4711, offsets back or on as "
            "-100 or +100, a time as 2026-01-31T08:00:00+01:00, or milliseconds since 1970 as 1769842800000ms"
        ) from None
    if moment.tzinfo is None:
        raise ConfigurationError(
            f"--to {text} is another moment in each time zone; write which is meant, as {moment.isoformat()}Z for UTC "
            f"or {moment.isoformat()}+01:00"
        )
    if moment < _EPOCH:
        raise ConfigurationError(f"--to {text} lies before 1970, where no message can be; write earliest")
    return AtTime((moment - _EPOCH) // timedelta(milliseconds=1))


@dataclass(frozen=True, slots=True)
class TopicChoice:
    """A topic, and which of its partitions; all when None."""

    topic: str
    partitions: frozenset[int] | None


def topic_choice(text: str) -> TopicChoice:
    """Return what `--topic` chooses: `orders`, or `orders:0,4-7`; `ConfigurationError` where that is nothing."""
    topic, colon, numbers = text.partition(":")
    found: set[int] = set()
    for item in numbers.split(",") if colon else ():
        named = _NUMBERS.fullmatch(item)
        numbered = range(int(named[1]), int(named[2] or named[1]) + 1) if named else ()
        if not numbered:
            raise _no_choice(text)
        found.update(numbered)
    if not topic:
        raise _no_choice(text)
    return TopicChoice(topic, frozenset(found) if colon else None)


def chosen(choices: Iterable[TopicChoice], counts: Mapping[str, int]) -> list[Part]:
    """Return the partitions that are chosen, in their order, given how many each topic has.

    `TopicNotFoundError` where there is no such topic, `ConfigurationError` where it has no such partition.
    """
    parts: set[Part] = set()
    for choice in choices:
        if choice.topic not in counts:
            raise TopicNotFoundError(f"there is no topic {choice.topic}; correct the name")
        count = counts[choice.topic]
        numbers = range(count) if choice.partitions is None else choice.partitions
        if outside := sorted(number for number in numbers if number >= count):
            raise ConfigurationError(
                f"topic {choice.topic} has no partition {outside[0]}; its {count} are 0 to {count - 1}"
            )
        parts.update((choice.topic, number) for number in numbers)
    return sorted(parts)


def _no_choice(text: str) -> ConfigurationError:
    return ConfigurationError(
        f"--topic {text!r} names no topic, or no partitions; write orders, or orders:0 or orders:0,4-7"
    )
