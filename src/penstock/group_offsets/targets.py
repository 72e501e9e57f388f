"""The parser of the options `--to` and `--topic`: the target of a reset, and its partitions. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import Enum, auto

from penstock.errors import ConfigurationError
from penstock.group_offsets.positions import Part

_MAX_OFFSET = (1 << 63) - 1
#: An offset, a shift of the committed offset (with a sign), or a time (with a unit).
_NUMBER = re.compile(r"([+-]?)(\d{1,19})(ms)?", re.ASCII)
_NUMBERS = re.compile(r"(\d{1,6})(?:-(\d{1,6}))?", re.ASCII)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class To(Enum):
    """The kinds of targets."""

    #: The start and the end of the log.
    EARLIEST = auto()
    LATEST = auto()
    #: The first message with this timestamp or a later one, in milliseconds since 1970; the end without one.
    TIME = auto()
    #: This offset.
    OFFSET = auto()
    #: This number of offsets after the committed one; negative: before it.
    SHIFT = auto()


@dataclass(frozen=True, slots=True)
class Target:
    """The target of a reset; the meaning of the number depends on the kind."""

    to: To
    number: int = 0


def target(text: str) -> Target:
    """Parse `--to`; `ConfigurationError` if it is invalid."""
    if text in {"earliest", "latest"}:
        return Target(To[text.upper()])
    if found := _NUMBER.fullmatch(text):
        sign, digits, unit = found.groups()
        if int(digits) <= _MAX_OFFSET and not (sign and unit):
            return Target(To.TIME if unit else To.SHIFT if sign else To.OFFSET, int(sign + digits))
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise ConfigurationError(
            f"--to {text!r} is no position; write earliest, latest, an offset (4711), a shift (-100 or +100), a time "
            "(2026-01-31T08:00:00+01:00) or milliseconds since 1970 (1769842800000ms)"
        ) from None
    if moment.tzinfo is None:
        raise ConfigurationError(
            f"--to {text} has no time zone; write {moment.isoformat()}Z for UTC, or for example "
            f"{moment.isoformat()}+01:00"
        )
    if moment < _EPOCH:
        raise ConfigurationError(f"--to {text} is before 1970, so before all messages; write earliest")
    return Target(To.TIME, (moment - _EPOCH) // timedelta(milliseconds=1))


@dataclass(frozen=True, slots=True)
class TopicChoice:
    """A topic and some of its partitions; None: all."""

    topic: str
    partitions: frozenset[int] | None


def topic_choice(text: str) -> TopicChoice:
    """Parse `--topic`: `orders`, or `orders:0,4-7`; `ConfigurationError` if it is invalid."""
    topic, colon, numbers = text.partition(":")
    items = [_NUMBERS.fullmatch(item) for item in numbers.split(",")] if colon else []
    runs = [range(int(item[1]), int(item[2] or item[1]) + 1) if item else range(0) for item in items]
    if not topic or not all(runs):
        raise ConfigurationError(
            f"--topic {text!r} names no topic, or no partitions; write orders, or orders:0 or orders:0,4-7"
        )
    return TopicChoice(topic, frozenset(number for run in runs for number in run) if colon else None)


def chosen(choices: Iterable[TopicChoice], counts: Mapping[str, int]) -> list[Part]:
    """Return the chosen partitions, sorted; `counts` has the number of partitions of each topic.

    `ConfigurationError` if a topic has no such partition.
    """
    parts: set[Part] = set()
    for choice in choices:
        count = counts[choice.topic]
        numbers = range(count) if choice.partitions is None else choice.partitions
        if outside := sorted(number for number in numbers if number >= count):
            raise ConfigurationError(
                f"topic {choice.topic} has no partition {outside[0]}; its {count} are 0 to {count - 1}"
            )
        parts.update((choice.topic, number) for number in numbers)
    return sorted(parts)
