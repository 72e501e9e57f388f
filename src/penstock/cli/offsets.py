"""`penstock offsets`: where a group stands in its topics, and the ways to have it stand elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.options import DryRun, GroupName, Partitions, Reading
from penstock.cli.output import Result, Table, counted

if TYPE_CHECKING:
    from penstock.group_offsets.group import Group, GroupState
    from penstock.group_offsets.planning import Change
    from penstock.group_offsets.positions import Position


def ls(cluster: Reading, *, group: GroupName, topic: Partitions = None) -> Result:
    """List by partition what a group has committed, its log and lag, and what is done above the commit point."""
    state = group_of(cluster, group).state(topic)
    rows = [
        {
            "topic": position.topic,
            "partition": position.partition,
            "committed": position.committed,
            "log_start": position.log.start,
            "log_end": position.log.stop,
            "lag": position.lag,
            "done_above": done_above(position),
            "members": [str(member) for member in state.members if position.part in member.partitions],
        }
        for position in state.positions
    ]
    facts = {"group": group, "state": state.state, "members": [str(member) for member in state.members]}
    notes = [f"group {group} is {state.state}, with {counted(len(state.members), 'member')}"]
    return Result([Table("partitions", rows)], facts, notes=[*notes, *odd_positions(state.positions)])


def reset(
    cluster: Reading,
    *,
    group: GroupName,
    to: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="earliest|latest|TIME|OFFSET|+N|-N",
            help="Where to. TIME: 2026-01-31T08:00:00Z, with its zone, or milliseconds since 1970, 1769846400000ms.",
        ),
    ],
    topic: Partitions = None,
    keep_done: Annotated[
        bool,
        typer.Option(
            "--keep-done", help="What is done above the commit point stays done. Without: it is handled again."
        ),
    ] = False,
    dry_run: DryRun = False,
) -> Result:
    """Have a group without members begin elsewhere. Ends with 1 where it is refused."""
    from penstock.errors import PenstockError

    known = group_of(cluster, group)
    state, changes = known.planned_reset(to, topic, keep_done=keep_done)
    failure: PenstockError | None = None
    if not dry_run:
        try:
            known.write(state, changes)
        except PenstockError as error:  # what it would have done is printed all the same
            failure = error
    rows = [_change_row(change) for change in changes]
    facts = {"group": group, "changed": not dry_run and failure is None}
    notes = () if failure is not None else _change_notes(changes, state, dry_run=dry_run)
    return Result([Table("partitions", rows)], facts, notes=list(notes), failure=failure)


def skip(
    cluster: Reading,
    *,
    group: GroupName,
    message: Annotated[str, typer.Argument(metavar="TOPIC:PARTITION@OFFSET", help="The message, as in orders:3@1204.")],
    dead_letter_topic: Annotated[
        str | None,
        typer.Option(help="Where its dead letter goes while no member runs. Left out: dlq.TOPIC."),
    ] = None,
    commands_topic: Annotated[
        str, typer.Option(help="Topic in which members that run hear commands.")
    ] = "penstock.commands",
    audit_topic: Annotated[str, typer.Option(help="Topic in which they answer.")] = "penstock.audit",
    dry_run: DryRun = False,
) -> Result:
    """Have a group pass over one message, which gets a dead letter.

    Members that run are asked to give it up: that takes an app with commands on, and a message that holds its
    partition. In a group without members it is marked done, wherever it stands. Ends with 1 where it is refused.
    """
    from penstock.cli import skipping
    from penstock.dead_letters.headers import DeadLetterFormat, default_topic
    from penstock.fleet.actions.performing import Surroundings
    from penstock.fleet_member import CommandSettings
    from penstock.group_offsets import planning
    from penstock.places import place_of

    topic, partition, offset = place_of(message)
    planning.refuse_coordinators(group, [topic])
    known = group_of(cluster, group)
    state = known.state([f"{topic}:{partition}"])
    letters = dead_letter_topic or default_topic(DeadLetterFormat.KAFKA).replace("{topic}", topic)
    if state.members:
        said = f"a dry run: members of {group} run, and would be asked to give {message} up"
        if not dry_run:
            commands = CommandSettings(commands_topic, audit_topic)
            around = Surroundings(cluster.servers, cluster.settings, commands)
            said = skipping.given_up_by_members(around, group, topic, partition, offset)
    else:
        change = planning.skip(group, state.positions[0], offset)
        said = f"a dry run: {message} would get a dead letter, and group {group} stand at {change.offset}"
        if not dry_run:
            # What would be refused is refused before the dead letter is written: a second try would write a second one.
            state = known.state([f"{topic}:{partition}"], to_change=True)
            part = topic, partition
            skipping.write_dead_letter(cluster.servers, cluster.settings, group, part, offset, letters=letters)
            known.write(state, [change])
            said = f"{message} is passed over: {letters} has it, and group {group} stands at {change.offset}"
    facts = {"group": group, "message": message, "dry_run": dry_run, "has_members": bool(state.members)}
    return Result(facts=facts, notes=[said])


def group_of(cluster: Reading, group: str) -> Group:
    """Return a group to look at, once a broker has answered."""
    from penstock.group_offsets.group import Group

    cluster.admin(f"the offsets of group {group} cannot be read")
    return Group(cluster.servers, cluster.settings, group)


def done_above(position: Position) -> int | str | None:
    """Return how many offsets are done above the commit; in words where metadata of another tool stands there."""
    if position.committed is None:
        return None
    return "? (foreign)" if position.is_foreign else position.done_above


def odd_positions(positions: Sequence[Position]) -> Iterator[str]:
    """Return what is to be said of positions that are not as usual, and of which."""
    found: dict[str, list[str]] = {}
    for position in positions:
        if position.committed is None:
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
    return (f"{', '.join(places)}: {text}" for text, places in found.items())


def _change_row(change: Change) -> dict[str, Any]:
    from penstock.group_offsets.positions import total

    return {
        "topic": change.before.topic,
        "partition": change.before.partition,
        "committed": change.before.committed,
        "becomes": change.offset,
        "handled_again": change.again,
        "skipped": change.skipped,
        "done_above_before": done_above(change.before),
        "done_above": total(change.done),
    }


def _change_notes(changes: Sequence[Change], state: GroupState, *, dry_run: bool) -> Iterator[str]:
    """Return what a change means, and whether it was made."""
    from penstock.group_offsets.positions import total

    again, skipped = sum(change.again for change in changes), sum(change.skipped for change in changes)
    yield f"handled again: {counted(again, 'offset')} that {_were(again)} done"
    yield f"skipped: {counted(skipped, 'offset')} that {_were(skipped)} not done"
    before, kept = sum(change.before.done_above for change in changes), sum(total(change.done) for change in changes)
    if before or kept:
        yield f"done above the commit point: {counted(before, 'offset')} before, {kept} from now on"
    if cut := sum(change.cut for change in changes):
        yield (
            f"{counted(cut, 'offset')} done above the commit point could not be kept, for a commit has room for 4,095 "
            "characters; they are handled again"
        )
    if unchanged := len(state.positions) - len(changes):
        yield f"{counted(unchanged, 'partition')} without an offset to count from stay as they are"
    yield from (f"before, {text}" for text in odd_positions([change.before for change in changes]))
    if dry_run:
        yield "a dry run: nothing was changed"
        if state.members:
            members = ", ".join(map(str, state.members))
            yield f"it would be refused now, for group {state.group} has members: {members}"
    else:
        yield f"group {state.group}: the offsets of {counted(len(changes), 'partition')} are written"


def _were(count: int) -> str:
    return "was" if count == 1 else "were"
