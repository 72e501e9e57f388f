"""The status of coordinators of a store in Kafka: the reasons why transactions wait, for operators.

An operator's tool reads the topics of a store and knows no coordinator. So the reasons have a topic: `<prefix>.status`,
one partition, kept for an hour. The latest record of each coordinator counts while it is fresh. No decision depends on
it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from types import MappingProxyType

from penstock.errors import MessageFormatError
from penstock.transactions.core.pending import Pending
from penstock.transactions.wire.ops import Verdict

#: Seconds after which a record no longer counts: its coordinator is gone, or cannot write.
STALE_S = 90.0

#: Limits of a record: reasons of each kind, characters of a text, and partitions.
_MOST_NAMED = 100
_MOST_CHARACTERS = 700
_MOST_PARTITIONS = 10_000

_VERSION = 2
_NOTHING: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Status:
    """The status record of one coordinator.

    Attributes:
        coordinator: its name, unique among running coordinators.
        at_ms: the time of writing, in milliseconds since the epoch.
        partitions: the half partitions that it owns or recovers.
        targets: topics that accept nothing now, or refused a pending message, each with the broker's reason.
        groups: producer groups that could not be checked, each with what its undecided transactions wait for.
        halts: the reasons why it publishes nothing.
        notes: problems that delay nothing.
    """

    coordinator: str
    at_ms: int
    partitions: tuple[int, ...] = ()
    targets: Mapping[str, str] = field(default_factory=lambda: _NOTHING)
    groups: Mapping[str, str] = field(default_factory=lambda: _NOTHING)
    halts: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def is_notable(self) -> bool:
        """Whether it reports any problem."""
        return bool(self.targets or self.groups or self.halts or self.notes)

    def lines(self) -> list[str]:
        """Return a sentence for each problem."""
        name = f"coordinator {self.coordinator}"
        return [
            *(f"topic {topic} refuses messages, as {name} reports: {why}" for topic, why in self.targets.items()),
            *(f"checks of {name} wait for {why}" for why in self.groups.values()),
            *(f"{name} waits for {why}" for why in self.halts),
            *(f"{name}: {why}" for why in self.notes),
        ]


def encode_status(status: Status) -> bytes:
    """Return the value of a record, cut to the limits; its key is the coordinator's name."""
    return json.dumps(
        {
            "version": _VERSION,
            "coordinator": status.coordinator[:_MOST_CHARACTERS],
            "at_ms": status.at_ms,
            "partitions": status.partitions[:_MOST_PARTITIONS],
            "targets": _cut(status.targets),
            "groups": _cut(status.groups),
            "halts": [text[:_MOST_CHARACTERS] for text in status.halts[:_MOST_NAMED]],
            "notes": [text[:_MOST_CHARACTERS] for text in status.notes[:_MOST_NAMED]],
        }
    ).encode()


def _cut(reasons: Mapping[str, str]) -> dict[str, str]:
    named = islice(reasons.items(), _MOST_NAMED)
    return {name[:_MOST_CHARACTERS]: why[:_MOST_CHARACTERS] for name, why in named}


def decode_status(value: bytes | None) -> Status:
    """Read the value of a record. Raises `MessageFormatError` unless this version's `encode_status` wrote it."""
    try:
        return _read(value or b"")
    # json raises RecursionError for too deeply nested values.
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        what = type(error).__name__
        raise MessageFormatError(f"a status record that does not read ({what}); it is skipped") from error


def _read(value: bytes) -> Status:
    fields = json.loads(value)
    status = Status(
        fields["coordinator"],
        fields["at_ms"],
        tuple(fields["partitions"]),
        {**fields["targets"]},
        {**fields["groups"]},
        tuple(fields["halts"]),
        tuple(fields["notes"]),
    )
    texts = (status.coordinator, *status.targets.values(), *status.groups.values(), *status.halts, *status.notes)
    numbers = (status.at_ms, *status.partitions)
    if not all(type(text) is str for text in texts) or not all(type(number) is int for number in numbers):
        raise TypeError("a text or a number is none")
    if encode_status(status) != value:
        raise ValueError("of another version, too large, or with fields that are not known")
    return status


def waits_for(pending: Pending, half_partition: int, statuses: Sequence[Status]) -> str:
    """Return what a transaction waits for, by the latest status of each coordinator; empty if it is not known."""
    owner = [status for status in statuses if half_partition in status.partitions]
    if pending.verdict is None:
        return next((status.groups[pending.group] for status in owner if pending.group in status.groups), "")
    why = target_text(pending.topics, statuses) if pending.verdict is Verdict.COMMIT else ""
    # If no coordinator has the partition, one without partitions may have the reason.
    asked = owner or [status for status in statuses if not status.partitions]
    return why or next((halt for status in asked for halt in status.halts), "")


def target_text(topics: Iterable[str], statuses: Iterable[Status]) -> str:
    """Return the reason if one of these topics refuses messages; else empty."""
    topics = list(dict.fromkeys(topics))
    reasons = (status.targets[topic] for status in statuses for topic in topics if topic in status.targets)
    why = next(reasons, None)
    return "" if why is None else f"topic {', '.join(topics)} to take it: {why}"
