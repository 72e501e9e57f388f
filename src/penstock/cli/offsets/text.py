"""How a group's offsets, a change of them and its lag are printed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from penstock.cli.output import age_text, print_table
from penstock.group_offsets.group import GroupState
from penstock.group_offsets.oldest import Oldest
from penstock.group_offsets.planning import Change
from penstock.group_offsets.positions import Part, Position, total

_NONE = "-"


def print_positions(state: GroupState) -> None:
    """Print where a group stands, a row for each partition."""
    print_table(
        ("topic", "partition", "committed", "log start", "log end", "lag", "done above", "member"),
        [
            (
                position.topic,
                str(position.partition),
                _number(position.committed),
                _number(None if position.log is None else position.log.start),
                _number(None if position.log is None else position.log.stop),
                _number(position.lag),
                _done_above(position),
                ", ".join(str(member) for member in state.members if position.part in member.partitions) or _NONE,
            )
            for position in state.positions
        ],
    )


def positions_as_json(state: GroupState) -> dict[str, Any]:
    """Return where a group stands as JSON has it."""
    return {
        "group": state.group,
        "state": str(state.state),
        "members": [str(member) for member in state.members],
        "partitions": [
            {
                "topic": position.topic,
                "partition": position.partition,
                "committed": position.committed,
                "log_start": None if position.log is None else position.log.start,
                "log_end": None if position.log is None else position.log.stop,
                "lag": position.lag,
                "done_above": position.done_above,
                "foreign_metadata": position.is_foreign,
            }
            for position in state.positions
        ],
    }


def changes_as_json(changes: Sequence[Change]) -> list[dict[str, Any]]:
    """Return a change as JSON has it, a row for each partition."""
    return [
        {
            "topic": change.before.topic,
            "partition": change.before.partition,
            "committed": change.before.committed,
            "becomes": change.offset,
            "handled_again": change.again,
            "skipped": change.skipped,
            "done_above_before": change.before.done_above,
            "done_above": total(change.done),
        }
        for change in changes
    ]


def position_lines(state: GroupState) -> Iterator[str]:
    """Return what there is to say of a group below its rows: its members, and what is odd."""
    yield f"group {state.group} is {state.state}, with {_counted(len(state.members), 'member')}"
    for text, places in _odd(state.positions).items():
        yield f"{', '.join(places)}: {text}"


def print_changes(changes: Sequence[Change]) -> None:
    """Print a change, a row for each partition."""
    print_table(
        ("topic", "partition", "committed", "becomes", "handled again", "skipped", "done above", "becomes"),
        [
            (
                change.before.topic,
                str(change.before.partition),
                _number(change.before.committed),
                str(change.offset),
                str(change.again),
                str(change.skipped),
                _done_above(change.before),
                str(total(change.done)),
            )
            for change in changes
        ],
    )


def change_lines(changes: Sequence[Change], state: GroupState, *, dry_run: bool) -> Iterator[str]:
    """Return what a change means, and whether it was made."""
    again, skipped = sum(change.again for change in changes), sum(change.skipped for change in changes)
    yield f"handled again: {_counted(again, 'offset')} that {_were(again)} done"
    yield f"skipped: {_counted(skipped, 'offset')} that {_were(skipped)} not done"
    before, kept = sum(change.before.done_above for change in changes), sum(total(change.done) for change in changes)
    if before or kept:
        yield f"done above the commit point: {_counted(before, 'offset')} before, {kept} from now on"
    if cut := sum(change.cut for change in changes):
        yield (
            f"{_counted(cut, 'offset')} done above the commit point could not be kept, for a commit has room for 4,095 "
            "characters; they are handled again"
        )
    if unchanged := len(state.positions) - len(changes):
        yield f"{_counted(unchanged, 'partition')} without an offset to count from, or without a log, stay as they are"
    for text, places in _odd([change.before for change in changes]).items():
        yield f"before, {', '.join(places)}: {text}"
    if dry_run:
        yield "a dry run: nothing was changed"
        if state.members:
            members = ", ".join(map(str, state.members))
            yield f"it would be refused now, for group {state.group} has members: {members}"
    else:
        yield f"group {state.group}: the offsets of {_counted(len(changes), 'partition')} are written"


def print_lag(positions: Sequence[Position], ages: Mapping[Part, tuple[Oldest, float | None]]) -> None:
    """Print a group's lag, a row for each partition; `ages` has the oldest message that is not done, and its age."""
    rows = []
    for position in positions:
        oldest, age_s = ages.get(position.part, (None, None))
        rows.append(
            (
                position.topic,
                str(position.partition),
                _number(position.committed),
                _number(None if position.log is None else position.log.stop),
                _number(position.lag),
                _done_above(position),
                _number(position.left),
                _NONE if oldest is None else str(oldest.offset),
                _NONE if age_s is None else age_text(age_s),
            )
        )
    print_table(
        ("topic", "partition", "committed", "log end", "lag", "done above", "not done", "oldest not done", "its age"),
        rows,
    )


def lag_lines(positions: Sequence[Position], ages: Mapping[Part, tuple[Oldest, float | None]]) -> Iterator[str]:
    """Return the total, and what is odd."""
    lag, left = sum(position.lag or 0 for position in positions), sum(position.left or 0 for position in positions)
    known = [(age_s, part, oldest) for part, (oldest, age_s) in ages.items() if age_s is not None]
    age_s, (topic, partition), oldest = max(
        known, default=(None, ("", 0), Oldest(0, None)), key=lambda known_age: known_age[0] or 0
    )
    last = "" if age_s is None else f"; the oldest, {topic}[{partition}]@{oldest.offset}, is {age_text(age_s)} old"
    unknown = sum(position.lag is None for position in positions)
    besides = f" (and {unknown} whose lag is not known)" if unknown else ""
    yield f"lag {lag} in {_counted(len(positions) - unknown, 'partition')}{besides}, {left} of it not done{last}"
    for text, places in _odd(positions).items():
        yield f"{', '.join(places)}: {text}"


def _odd(positions: Sequence[Position]) -> dict[str, list[str]]:
    """Return what is to be said of positions that are not as usual, and of which."""
    found: dict[str, list[str]] = {}
    for position in positions:
        if position.log is None:
            text = "there is no such partition any more, or this user may not see it"
        elif position.committed is None:
            text = "no offset is committed; an app begins at the first message, if its auto.offset.reset is not another"
        elif position.is_past_the_end:
            text = "the committed offset lies past the end of the log, as where the topic was made again"
        elif position.is_before_the_start:
            text = "the committed offset lies before the start of the log; what is missing was deleted"
        elif position.is_foreign:
            text = "the commit's metadata is no offset map of this group and partition; nothing above it counts as done"
        else:
            continue
        found.setdefault(text, []).append(position.place)
    return found


def _done_above(position: Position) -> str:
    if position.committed is None or position.log is None:
        return _NONE
    return "? (foreign)" if position.is_foreign else str(position.done_above)


def _number(value: int | None) -> str:
    return _NONE if value is None else str(value)


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"


def _were(count: int) -> str:
    return "was" if count == 1 else "were"
