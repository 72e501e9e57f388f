"""A group's offsets as a file: readable JSON, with offset maps as ranges.

Format, version 1::

    {"format": "penstock-offsets", "version": 1, "group": "sms", "exported": "2026-01-31T08:00:00+00:00",
     "topic_ids": {"orders": "..."},
     "partitions": [{"topic": "orders", "partition": 0, "offset": 120, "done": [[125, 131]]}]}

`offset` is the next one to handle, `done` has the first and the last offset of each range that is done above it. The id
of a topic that is made again is another; one that is left out is not compared. Nothing here is bound to the group: an
offset map is written down again for the group that takes it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any, TypeGuard

from penstock.errors import ConfigurationError
from penstock.group_offsets.planning import Wanted
from penstock.group_offsets.positions import Part, Position

FORMAT = "penstock-offsets"
VERSION = 1

_MAX_OFFSET = (1 << 63) - 1


@dataclass(frozen=True, slots=True)
class Export:
    """What a file holds."""

    #: The group it was taken from.
    group: str
    #: Ids of the topics, of those that have one.
    topic_ids: Mapping[str, str]
    wanted: Mapping[Part, Wanted]


def to_json(group: str, positions: Iterable[Position], topic_ids: Mapping[str, str], now_s: float) -> str:
    """Return a group's committed offsets as text, a line for each partition; `now_s` are seconds since 1970."""
    lines = []
    for position in positions:
        if position.committed is not None:
            row = {"topic": position.topic, "partition": position.partition, "offset": position.committed}
            done = {"done": [[run.start, run.stop - 1] for run in position.done]} if position.done else {}
            lines.append(f"\n    {json.dumps({**row, **done})}")
    head = {
        "format": FORMAT,
        "version": VERSION,
        "group": group,
        "exported": datetime.fromtimestamp(int(now_s), UTC).isoformat(),
        "topic_ids": dict(topic_ids),
    }
    return f'{json.dumps(head, indent=2)[:-2]},\n  "partitions": [{",".join(lines)}\n  ]\n}}\n'


def from_json(text: str) -> Export:
    """Return what a file holds.

    `ConfigurationError` where it is not of this format, of a newer version, or contradicts itself: what is wrong where.
    """
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        raise ConfigurationError(
            f"this is no JSON, so no {FORMAT}; give a file that `penstock offsets export` wrote"
        ) from None
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise ConfigurationError(f'"format" is not "{FORMAT}"; give a file that `penstock offsets export` wrote')
    if found.get("version") != VERSION:
        raise ConfigurationError(
            f"the file has version {found.get('version')!r} of {FORMAT}, and this penstock reads {VERSION}; use the "
            "one that wrote it, or a newer one"
        )
    group, ids, rows = found.get("group"), found.get("topic_ids", {}), found.get("partitions")
    if not isinstance(group, str) or not isinstance(ids, dict) or not isinstance(rows, list):
        raise ConfigurationError(
            '"group" must be a name, "topic_ids" an object and "partitions" a list; correct the file, or export again'
        )
    wanted: dict[Part, Wanted] = {}
    for number, row in enumerate(rows, 1):
        part, position = _wanted(number, row)
        if part in wanted:
            raise ConfigurationError(f"{part[0]}[{part[1]}] stands twice in the file; leave one of them out")
        wanted[part] = position
    return Export(group, {name: str(topic_id) for name, topic_id in ids.items()}, wanted)


def _wanted(number: int, row: Any) -> tuple[Part, Wanted]:
    """Return what one row of the file says."""
    values = row if isinstance(row, dict) else {}
    topic, partition, offset = values.get("topic"), values.get("partition"), values.get("offset")
    if not isinstance(topic, str) or not _is_offset(partition) or not _is_offset(offset):
        raise ConfigurationError(
            f'row {number} of "partitions" must have a "topic", a "partition" and an "offset", whole numbers from 0 '
            "on; correct the file"
        )
    place, pairs = f"{topic}[{partition}]", values.get("done", [])
    if not isinstance(pairs, list) or not all(map(_is_pair, pairs)):
        raise ConfigurationError(f'"done" of {place} must be a list of [first, last] offsets; correct the file')
    runs = tuple(range(first, last + 1) for first, last in pairs)
    rising = all(before.stop <= after.start for before, after in pairwise(runs))
    if not all(runs) or not rising or (runs and runs[0].start <= offset):
        raise ConfigurationError(
            f'"done" of {place} must have ranges that rise, all above offset {offset}; correct the file'
        )
    return (topic, partition), Wanted(offset, runs)


def require_same_topics(given: Export, topic_ids: Mapping[str, str]) -> None:
    """Raise `ConfigurationError` where a topic was made again since the export; `topic_ids` are those of today."""
    for name, topic_id in sorted(given.topic_ids.items()):
        if topic_ids.get(name, topic_id) != topic_id:
            raise ConfigurationError(
                f"nothing was changed: topic {name} is not the one of the file, it was made again or is of another "
                "cluster, so that these offsets may be those of other messages; where they are not, take its line out "
                'of "topic_ids" in the file'
            )


def _is_pair(value: Any) -> bool:
    return isinstance(value, list) and len(value) == len(("first", "last")) and all(map(_is_offset, value))


def _is_offset(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _MAX_OFFSET
