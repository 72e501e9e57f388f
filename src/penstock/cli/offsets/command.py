"""`penstock offsets`: where a group stands in its topics, and the ways to have it stand elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from penstock.cli.options.connection import BootstrapServers, ClientSettings, ConfigFile, client_settings
from penstock.cli.output import AsJson, print_json
from penstock.errors import ConfigurationError, PenstockError

if TYPE_CHECKING:
    from penstock.group_offsets.group import Group, GroupState
    from penstock.group_offsets.planning import Change

GroupName = Annotated[str, typer.Argument(metavar="GROUP", help="The group: the name of an App.")]
FileName = Annotated[str, typer.Argument(metavar="FILE", help="A file; - for standard input or output.")]
Topics = Annotated[
    list[str] | None,
    typer.Option(
        "--topic",
        metavar="TOPIC[:PARTITIONS]",
        help="Only this topic, or these partitions of it: orders:0,4-7. Repeatable. Left out: all that the group has "
        "offsets of.",
    ),
]
DryRun = Annotated[bool, typer.Option("--dry-run", help="Show what would be, and change nothing.")]


def offsets() -> typer.Typer:
    """Return the commands for offsets. Each help text ends with an example."""
    app = typer.Typer(
        name="offsets",
        help="Look at a group's offsets, move them, write them to a file and take them from one.",
        epilog="Example: penstock offsets ls sms --bootstrap-servers 127.0.0.1:9092",
        no_args_is_help=True,
    )
    app.command(epilog="Example: penstock offsets ls sms")(ls)
    app.command(epilog="Example: penstock offsets reset sms --to 2026-01-31T08:00:00Z --topic orders --dry-run")(reset)
    app.command(epilog="Example: penstock offsets export sms sms.json")(export)
    app.command(epilog="Example: penstock offsets skip sms orders:3@1204")(skip)
    app.command("import", epilog="Example: penstock offsets import sms sms.json --dry-run")(import_)
    return app


def ls(  # noqa: PLR0917 - as `reset`
    bootstrap_servers: BootstrapServers,
    group: GroupName,
    topic: Topics = None,
    config: ClientSettings = None,
    config_file: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """List by partition what a group has committed, its log and lag, and what is done above the commit point.

    Exit codes: 0 done, 1 failed, 2 wrong use, 3 no broker.
    """
    from penstock.cli.offsets.text import position_lines, positions_as_json, print_positions
    from penstock.group_offsets.group import Group
    from penstock.group_offsets.moving import looked_at

    known = Group(bootstrap_servers, client_settings(config, config_file), group)
    state = looked_at(known, topic)
    if as_json:
        print_json(positions_as_json(state))
        return
    print_positions(state)
    for line in position_lines(state):
        typer.echo(line)


def reset(  # noqa: PLR0917 - typer reads options from parameters; nobody calls this by position
    bootstrap_servers: BootstrapServers,
    group: GroupName,
    to: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="earliest|latest|TIME|OFFSET|+N|-N",
            help="Where to. TIME: 2026-01-31T08:00:00Z, with its zone, or milliseconds since 1970, 1769846400000ms.",
        ),
    ],
    topic: Topics = None,
    keep_done: Annotated[
        bool,
        typer.Option(
            "--keep-done", help="What is done above the commit point stays done. Without: it is handled again."
        ),
    ] = False,
    dry_run: DryRun = False,
    config: ClientSettings = None,
    config_file: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Have a group without members begin elsewhere.

    Exit codes: 0 done, 1 failed or refused, 2 wrong use, 3 no broker.
    """
    from penstock.group_offsets.group import Group
    from penstock.group_offsets.moving import planned_reset

    known = Group(bootstrap_servers, client_settings(config, config_file), group)
    state, changes = planned_reset(known, to, topic, keep_done=keep_done)
    _change(known, state, changes, dry_run=dry_run, as_json=as_json)


def export(  # noqa: PLR0917 - as `reset`
    bootstrap_servers: BootstrapServers,
    group: GroupName,
    file: FileName,
    topic: Topics = None,
    config: ClientSettings = None,
    config_file: ConfigFile = None,
) -> None:
    """Write a group's offsets to a file, as JSON: what is done above a commit point as ranges.

    Exit codes: 0 done, 1 failed, 2 wrong use, 3 no broker.
    """
    from penstock.cli.offsets.text import position_lines
    from penstock.group_offsets.exchange import to_json
    from penstock.group_offsets.group import Group
    from penstock.group_offsets.moving import looked_at

    known = Group(bootstrap_servers, client_settings(config, config_file), group)
    state = looked_at(known, topic)
    committed = [position for position in state.positions if position.committed is not None]
    there = {position.topic for position in committed if position.log is not None}
    text = to_json(group, committed, known.topic_ids(there), time.time())
    if file == "-":
        typer.echo(text, nl=False)
    else:
        try:
            Path(file).write_text(text, encoding="utf-8")
        except OSError as error:
            raise PenstockError(f"{file} cannot be written: {error.strerror}; name another file") from error
        typer.echo(f"the offsets of {len(committed)} partitions of group {group} are in {file}")
    for line in position_lines(state):
        typer.echo(line, err=True)
    if state.members:
        typer.echo(f"group {group} has members, so these offsets are those of a moment of its work", err=True)


def import_(  # noqa: PLR0917 - as `reset`
    bootstrap_servers: BootstrapServers,
    group: GroupName,
    file: FileName,
    dry_run: DryRun = False,
    config: ClientSettings = None,
    config_file: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Have a group without members stand where a file says, that of another group, too.

    Exit codes: 0 done, 1 failed or refused, 2 wrong use, 3 no broker.
    """
    from penstock.group_offsets.exchange import from_json, require_same_topics
    from penstock.group_offsets.group import Group
    from penstock.group_offsets.planning import plan, refuse_coordinators
    from penstock.group_offsets.targets import TopicChoice, chosen

    given = from_json(_text(file))
    known = Group(bootstrap_servers, client_settings(config, config_file), group)
    topics = sorted({topic for topic, _ in given.wanted})
    counts = known.topics(topics)
    known.require_rights_to_write(topics)
    parts = chosen((TopicChoice(topic, frozenset([number])) for topic, number in given.wanted), counts)
    require_same_topics(given, known.topic_ids(topics))
    if given.group != group:
        typer.echo(f"these are the offsets of group {given.group}; group {group} gets them, too", err=as_json)
    state = known.state(counts, parts)
    refuse_coordinators(state.group, [topic for topic, _ in given.wanted])
    changes = plan(state.group, state.positions, given.wanted)
    _change(known, state, changes, dry_run=dry_run, as_json=as_json)


def skip(  # noqa: PLR0917 - as `reset`
    bootstrap_servers: BootstrapServers,
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
    config: ClientSettings = None,
    config_file: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Have a group pass over one message, which gets a dead letter.

    Members that run are asked to give it up: that takes an app with commands on, and a message that holds its
    partition. In a group without members it is marked done, wherever it stands.

    Exit codes: 0 done, 1 failed or refused, 2 wrong use, 3 no broker.
    """
    from penstock.cli.offsets.skip import Skipping
    from penstock.fleet_member import CommandSettings

    skipping = Skipping(bootstrap_servers, client_settings(config, config_file), group, message)
    state = skipping.state()
    if state.members:
        said = f"a dry run: members of {group} run, and would be asked to give {skipping.place} up"
        if not dry_run:
            said = skipping.by_members(CommandSettings(commands_topic, audit_topic))
    else:
        change = skipping.planned(state)
        said = f"a dry run: {skipping.place} would get a dead letter, and group {group} stand at {change.offset}"
        if not dry_run:
            letters = skipping.write(change, dead_letter_topic)
            said = f"{skipping.place} is passed over: {letters} has it, and group {group} stands at {change.offset}"
    if as_json:
        asked = bool(state.members)
        print_json({"group": group, "message": skipping.place, "dry_run": dry_run, "members": asked, "said": said})
    else:
        typer.echo(said)


def _change(known: Group, state: GroupState, changes: Sequence[Change], *, dry_run: bool, as_json: bool) -> None:
    """Show a change, and make it."""
    from penstock.cli.offsets.text import change_lines, changes_as_json, print_changes
    from penstock.group_offsets.moving import move

    if not as_json:
        print_changes(changes)
    if not dry_run:
        move(known, state, changes)
    if as_json:
        print_json({"group": state.group, "changed": not dry_run, "partitions": changes_as_json(changes)})
        return
    for line in change_lines(changes, state, dry_run=dry_run):
        typer.echo(line)


def _text(file: str) -> str:
    try:
        return sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{file} cannot be read: {type(error).__name__}; name another file") from error
