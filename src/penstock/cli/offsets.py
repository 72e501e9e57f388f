"""`penstock offsets`: the positions of a group in its topics, and the commands that change them."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from penstock.cli.options import DryRun, GroupName, Partitions, Reading
from penstock.cli.output import Result, Table
from penstock.places import counted, place_of, place_text

if TYPE_CHECKING:
    from penstock.fleet.actions.dispatch import ActionContext
    from penstock.group_offsets.group import Group, GroupState
    from penstock.group_offsets.planning import Change
    from penstock.group_offsets.positions import Position
    from penstock.message import Record

#: The timeout in seconds for reading the skipped message.
_READ_BUDGET_S = 15.0
#: No limit by the client: the size limit of the dead-letter topic decides.
_ANY_SIZE = {"message.max.bytes": 1_000_000_000}


def ls(cluster: Reading, *, group: GroupName, topic: Partitions = None) -> Result:
    """List for each partition of a group: committed offset, log, lag, and offsets done above the commit point."""
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
            help="The new position. TIME has its time zone, 2026-01-31T08:00:00Z, or is milliseconds since 1970, "
            "1769846400000ms.",
        ),
    ],
    topic: Partitions = None,
    keep_done: Annotated[
        bool,
        typer.Option(
            "--keep-done",
            help="Offsets done above the commit point stay done. Without it, their messages are handled again.",
        ),
    ] = False,
    dry_run: DryRun = False,
) -> Result:
    """Change the committed offsets of a group without members. Ends with 1 if it is refused."""
    from penstock.errors import PenstockError

    known = group_of(cluster, group)
    state, changes = known.planned_reset(to, topic, keep_done=keep_done)
    failure: PenstockError | None = None
    if not dry_run:
        try:
            known.write(state, changes)
        except PenstockError as error:  # the planned changes are printed first
            failure = error
    rows = [_change_row(change) for change in changes]
    facts = {"group": group, "changed": not dry_run and failure is None}
    notes = () if failure is not None else _change_notes(changes, state, dry_run=dry_run)
    return Result([Table("partitions", rows)], facts, notes=list(notes), failure=failure)


def skip(
    cluster: Reading,
    *,
    group: GroupName,
    message: Annotated[str, typer.Argument(metavar="TOPIC:PARTITION@OFFSET", help="The message: orders:3@1204.")],
    dead_letter_topic: Annotated[
        str | None,
        typer.Option(help="Topic of its dead letter if the group has no members. Default: dlq.TOPIC."),
    ] = None,
    commands_topic: Annotated[str, typer.Option(help="Topic of commands to running members.")] = "penstock.commands",
    audit_topic: Annotated[str, typer.Option(help="Topic of their answers.")] = "penstock.audit",
    dry_run: DryRun = False,
) -> Result:
    """Skip one message of a group, and write its dead letter.

    If the group has members, they get a command to give the message up. The app must run with commands on, and the
    message must hold its partition. If the group has no members, the message is marked as done in the committed
    offsets, wherever it is. Ends with 1 if it is refused.
    """
    from penstock.dead_letters.headers import DeadLetterFormat, default_topic
    from penstock.fleet.actions.dispatch import ActionContext
    from penstock.fleet_member import CommandSettings
    from penstock.group_offsets import planning

    topic, partition, offset = place_of(message)
    planning.refuse_coordinators(group, [topic])
    known = group_of(cluster, group)
    state = known.state([f"{topic}:{partition}"])
    target = dead_letter_topic or default_topic(DeadLetterFormat.KAFKA).replace("{topic}", topic)
    if state.members:
        said = f"a dry run: the members of {group} would get the command to give {message} up"
        if not dry_run:
            commands = CommandSettings(commands_topic, audit_topic)
            context = ActionContext(cluster.servers, cluster.settings, commands)
            said = _give_up_by_members(context, group, topic, partition, offset)
    else:
        change = planning.skip(group, state.positions[0], offset)
        said = f"a dry run: {message} would get a dead letter, and group {group} would stand at {change.offset}"
        if not dry_run:
            # The permission is checked before the dead letter is written: a second attempt would write a second one.
            state = known.state([f"{topic}:{partition}"], to_change=True)
            _write_dead_letter(cluster, group, (topic, partition), offset, target)
            known.write(state, [change])
            said = f"{message} is skipped: {target} has it, and group {group} stands at {change.offset}"
    facts = {"group": group, "message": message, "dry_run": dry_run, "has_members": bool(state.members)}
    return Result(facts=facts, notes=[said])


def _give_up_by_members(context: ActionContext, group: str, topic: str, partition: int, offset: int) -> str:
    """Send members the command to give a message up; return their answer, or raise `PenstockError` without success."""
    from penstock.errors import PenstockError
    from penstock.fleet.actions.dispatch import perform
    from penstock.fleet.commands.command import command_of
    from penstock.fleet_member import Outcome

    arguments = {"group": group, "topic": topic, "partition": partition, "offset": offset}
    command = command_of("give-up", arguments, by="penstock offsets skip", asked_ms=int(time.time() * 1000))
    answer = perform(command, context)
    if answer.outcome is not Outcome.DONE:
        raise PenstockError(f"{answer.said}; or stop all members of {group}, and run the command again")
    return answer.said


def _write_dead_letter(cluster: Reading, group: str, part: tuple[str, int], offset: int, target: str) -> None:
    """Write a message to the dead-letter topic `target`, created like by an app. Raises the errors of `read_record`."""
    from penstock.clients import cluster as clusters
    from penstock.clients.reading import read_record
    from penstock.consumer.poll.topics import create_outputs
    from penstock.dead_letters.headers import DeadLetterFormat, DeadLetterOrigin, write
    from penstock.errors import GivenUpError
    from penstock.fleet.topics import RecordWriter

    servers, config = cluster.servers, cluster.settings
    record = cast("Record", read_record(servers, config, part, offset, _READ_BUDGET_S))
    origin = DeadLetterOrigin.of(record, GivenUpError(place_text(*part, offset), 0, ""), group=group, attempts=0)
    client = clusters.Cluster(servers, config)
    create_outputs(client, client.require_topics([part[0]]), {target: (part[0],)})
    headers = write(DeadLetterFormat.KAFKA, record, origin)
    RecordWriter(servers, {**config, **_ANY_SIZE}).write(target, record.value(), record.key(), headers=headers)


def group_of(cluster: Reading, group: str) -> Group:
    """Return a group after a broker has answered."""
    from penstock.group_offsets.group import Group

    cluster.admin(f"the offsets of group {group} cannot be read")
    return Group(cluster.servers, cluster.settings, group)


def done_above(position: Position) -> int | str | None:
    """Return the number of offsets done above the committed one; a text if the metadata is of another tool."""
    if position.committed is None:
        return None
    return "? (foreign)" if position.is_foreign else position.done_above


def odd_positions(positions: Sequence[Position]) -> Iterator[str]:
    """Yield a sentence for each kind of unusual position, with the partitions that have it."""
    found: dict[str, list[str]] = {}
    for position in positions:
        if position.committed is None:
            text = "no offset is committed; an app begins at the first message, unless its auto.offset.reset differs"
        elif position.is_past_the_end:
            text = "the committed offset lies past the end of the log; maybe the topic was recreated"
        elif position.is_before_the_start:
            text = "the committed offset lies before the start of the log; the messages between were deleted"
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
    """Yield the consequences of changes, and whether they were made."""
    from penstock.group_offsets.positions import total

    again, skipped = sum(change.again for change in changes), sum(change.skipped for change in changes)
    yield f"handled again: {counted(again, 'offset')} that {_were(again)} done"
    yield f"skipped: {counted(skipped, 'offset')} that {_were(skipped)} not done"
    before, kept = sum(change.before.done_above for change in changes), sum(total(change.done) for change in changes)
    if before or kept:
        yield f"done above the commit point: {counted(before, 'offset')} before, {kept} from now on"
    if cut := sum(change.cut for change in changes):
        yield (
            f"{counted(cut, 'offset')} done above the commit point could not be kept, because a commit has room for "
            "4,095 characters; they are handled again"
        )
    if unchanged := len(state.positions) - len(changes):
        yield f"{counted(unchanged, 'partition')} without an offset to count from stay as they are"
    yield from (f"before, {text}" for text in odd_positions([change.before for change in changes]))
    if dry_run:
        yield "a dry run: nothing was changed"
        if state.members:
            members = ", ".join(map(str, state.members))
            yield f"it would be refused now, because group {state.group} has members: {members}"
    else:
        yield f"group {state.group}: the offsets of {counted(len(changes), 'partition')} are written"


def _were(count: int) -> str:
    return "was" if count == 1 else "were"
