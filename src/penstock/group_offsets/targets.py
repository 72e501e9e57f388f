"""What an operator writes to say where a group is to go, and in which partitions. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from enum import Enum, auto

from penstock.errors import ConfigurationError
from penstock.group_offsets.positions import Part

_MAX_OFFSET = (1 << 63) - 1
#: An offset; with a sign one from the committed offset on; with its unit a time.
_NUMBER = re.compile(r"([+-]?)(\d{1,19})(ms)?", re.ASCII)
_NUMBERS = re.compile(r"(\d{1,6})(?:-(\d{1,6}))?", re.ASCII)
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


class To(Enum):
    """What a group can be sent to."""

    #: The ends of a log.
    EARLIEST = auto()
    LATEST = auto()
    #: The first message that is so late, by its timestamp in milliseconds since 1970; the end where none is.
    TIME = auto()
    #: This offset.
    OFFSET = auto()
    #: So many offsets on from the committed one, or back.
    SHIFT = auto()


@dataclass(frozen=True, slots=True)
class Target:
    """Where a group is to go; what the number is depends on what it is sent to."""

    to: To
    number: int = 0


def target(text: str) -> Target:
    """Return where `--to` wants a group; `ConfigurationError` where it is none of what can be written there."""
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
    return Target(To.TIME, (moment - _EPOCH) // timedelta(milliseconds=1))


@dataclass(frozen=True, slots=True)
class TopicChoice:
    """A topic, and which of its partitions; all when None."""

    topic: str
    partitions: frozenset[int] | None


def topic_choice(text: str) -> TopicChoice:
    """Return what `--topic` chooses: `orders`, or `orders:0,4-7`; `ConfigurationError` where that is nothing."""
    topic, colon, numbers = text.partition(":")
    items = [_NUMBERS.fullmatch(item) for item in numbers.split(",")] if colon else []
    runs = [range(int(item[1]), int(item[2] or item[1]) + 1) if item else range(0) for item in items]
    if not topic or not all(runs):
        raise ConfigurationError(
            f"--topic {text!r} names no topic, or no partitions; write orders, or orders:0 or orders:0,4-7"
        )
    return TopicChoice(topic, frozenset(number for run in runs for number in run) if colon else None)


def chosen(choices: Iterable[TopicChoice], counts: Mapping[str, int]) -> list[Part]:
    """Return the partitions that are chosen, in their order, given how many each topic has.

    `ConfigurationError` where a topic has no such partition.
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
