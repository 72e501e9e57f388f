"""`penstock dlq`: what lies in dead-letter topics, why, and the way back to work."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.options.connection import BootstrapServers, ClientSettings, ConfigFile, client_settings
from penstock.cli.output import AsJson, log_to_stderr, print_json, print_table
from penstock.errors import ConfigurationError, PenstockError

if TYPE_CHECKING:
    from penstock.dead_letters.reader import DeadLetterLog
    from penstock.dead_letters.replay import Choice, Outcome
    from penstock.options import ClientConfig

_ROW_LIMIT = 50

DeadLetterTopic = Annotated[str, typer.Argument(metavar="TOPIC", help="The dead-letter topic.")]


def dlq() -> typer.Typer:
    """Return the commands for dead letters. Each help text ends with an example."""
    app = typer.Typer(
        name="dlq",
        help="Look at dead letters, and send them back to work.",
        epilog="Example: penstock dlq ls --all --bootstrap-servers 127.0.0.1:9092",
        no_args_is_help=True,
    )
    app.command(epilog="Example: penstock dlq ls dlq.orders")(ls)
    app.command(epilog="Example: penstock dlq show dlq.orders 0:17 --payload")(show)
    app.command(epilog="Example: penstock dlq replay dlq.orders --where exception=TimeoutError --dry-run")(replay)
    return app


def ls(  # noqa: PLR0917 - typer reads options from parameters; nobody calls this by position
    bootstrap_servers: BootstrapServers,
    topic: Annotated[str | None, typer.Argument(metavar="TOPIC", help="The dead-letter topic.")] = None,
    every: Annotated[bool, typer.Option("--all", help="All topics called dlq.* or *-dlt that you may see.")] = False,
    limit: Annotated[int, typer.Option(min=1, help="Rows to print, the largest counts first.")] = _ROW_LIMIT,
    config: ClientSettings = None,
    config_file: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Count dead letters by where they come from and why they died, and how many of them were replayed.

    Exit codes: 0 done, 1 failed, 2 wrong use, 3 no broker.
    """
    from penstock.cli.dlq.text import kind_row
    from penstock.dead_letters.kinds import count

    settings = client_settings(config, config_file)
    if every == (topic is not None):
        raise ConfigurationError("name one dead-letter topic, or give --all; not both")
    with _topics(bootstrap_servers, settings) as (log, partitions):
        if topic is None:
            names = [name for name in sorted(partitions) if name.startswith("dlq.") or name.endswith("-dlt")]
        else:
            names = [topic]
        knows_replays = _may_know_replays(bootstrap_servers, settings)
        counts = {name: _partition_count(name, partitions, bootstrap_servers, settings) for name in names}
        kinds = {name: count(log, name, counts[name], knows_replays=knows_replays) for name in names}
    if as_json:
        print_json([{"dead_letter_topic": name, **asdict(kind)} for name, found in kinds.items() for kind in found])
        return
    if not names:
        typer.echo("there is no topic called dlq.* or *-dlt")
    for name, found in kinds.items():
        total = sum(kind.count for kind in found)
        typer.echo(f"{name}: {total} dead letter{'' if total == 1 else 's'}")
    rows = [(name, kind) for name, found in kinds.items() for kind in found]
    rows.sort(key=lambda row: (-row[1].count, row[0]))
    head = ("count", "replayed", "dead-letter topic", "from", "exception", "first", "last")
    print_table(head, [kind_row(name, kind) for name, kind in rows[:limit]])
    if len(rows) > limit:
        typer.echo(f"and {len(rows) - limit} more rows; see them with --limit {len(rows)}")


def show(  # noqa: PLR0917 - typer reads options from parameters; nobody calls this by position
    bootstrap_servers: BootstrapServers,
    topic: DeadLetterTopic,
    place: Annotated[
        str | None, typer.Argument(metavar="[PARTITION:OFFSET]", help="One dead letter; the newest when left out.")
    ] = None,
    last: Annotated[int | None, typer.Option(min=1, help="The newest so many, in the order of their time.")] = None,
    payload: Annotated[
        bool, typer.Option("--payload", help="Print key, value, values of headers and the exception's text, too.")
    ] = False,
    config: ClientSettings = None,
    config_file: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Print dead letters: where they come from, what they died of and where, their headers.

    Exit codes: 0 done, 1 failed, 2 wrong use, 3 no broker.
    """
    from penstock.cli.dlq.text import letter_as_json, lines

    settings = client_settings(config, config_file)
    if place is not None and last is not None:
        raise ConfigurationError("name one dead letter by PARTITION:OFFSET, or give --last; not both")
    wanted = None if place is None else _place(place)
    with _topics(bootstrap_servers, settings) as (log, partitions):
        total = _partition_count(topic, partitions, bootstrap_servers, settings)
        if wanted is None:
            letters = log.newest(topic, total, last or 1)
        else:
            letter = log.at(topic, *wanted) if wanted[0] < total else None
            if letter is None:
                raise PenstockError(
                    f"there is no message at {topic}[{wanted[0]}]@{wanted[1]}; `penstock dlq show {topic} --last 10` "
                    "names some that are there"
                )
            letters = [letter]
    if as_json:
        print_json([letter_as_json(letter, payload=payload) for letter in letters])
        return
    if not letters:
        typer.echo(f"{topic} is empty")
    for letter in letters:
        typer.echo("\n".join(lines(letter, payload=payload)))


def replay(  # noqa: PLR0917 - typer reads options from parameters; nobody calls this by position
    bootstrap_servers: BootstrapServers,
    topic: DeadLetterTopic,
    to: Annotated[str | None, typer.Option(help="Send all to this topic, not to their original ones.")] = None,
    where: Annotated[
        list[str] | None,
        typer.Option(
            help="Only those with exception=CLASS, with or without its module, or topic=ORIGINAL. Repeatable."
        ),
    ] = None,
    start: Annotated[
        str | None, typer.Option("--from", metavar="PARTITION:OFFSET", help="Only this partition, from there on.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Send so many at most.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Say what would be sent, and send nothing.")] = False,
    again: Annotated[bool, typer.Option("--again", help="Send also what an earlier replay sent.")] = False,
    config: ClientSettings = None,
    config_file: ConfigFile = None,
    as_json: AsJson = False,
) -> None:
    """Send dead letters back to work, with their keys, values and own headers; at least once.

    What was sent is remembered in the offsets of group penstock-dlq-replay, so that the next replay goes on from
    there, as long as the broker keeps them: 7 days after the last replay unless it was set up otherwise.

    Exit codes: 0 done, 1 failed or some cannot go anywhere, 2 wrong use, 3 no broker.
    """
    from penstock.dead_letters.replay import Replay

    settings = client_settings(config, config_file)
    choice = _choice(where or (), start)
    log_to_stderr()
    with _topics(bootstrap_servers, settings) as (log, partitions):
        _partition_count(topic, partitions, bootstrap_servers, settings)
        if not dry_run:
            _require_rights_to_replay(bootstrap_servers, settings, topic, to)
        work = Replay(
            log,
            bootstrap_servers=bootstrap_servers,
            config=settings,
            topic=topic,
            partitions=partitions,
            choice=choice,
            to=to,
            limit=limit,
            again=again,
            dry_run=dry_run,
        )
        try:
            work.run()
        finally:
            if as_json:
                print_json(_outcome_as_json(work.outcome, topic, dry_run=dry_run))
            else:
                _print_outcome(work.outcome, topic, dry_run=dry_run)
    _raise_for_left(work.outcome, topic, settings)


@contextmanager
def _topics(bootstrap_servers: str, config: ClientConfig) -> Iterator[tuple[DeadLetterLog, Mapping[str, int]]]:
    """Open a log, and tell how many partitions each topic has: that also finds out whether a broker answers."""
    from penstock import clients
    from penstock.clients.topics import partition_counts
    from penstock.dead_letters.reader import DeadLetterLog

    counts = partition_counts(clients.admin(bootstrap_servers, config), bootstrap_servers)
    with DeadLetterLog(bootstrap_servers, config) as log:
        yield log, counts


def _partition_count(topic: str, partitions: Mapping[str, int], bootstrap_servers: str, config: ClientConfig) -> int:
    from penstock import clients
    from penstock.clients.rights import principal_of
    from penstock.clients.topics import require_topics
    from penstock.errors import TopicNotFoundError

    if topic in partitions:
        return partitions[topic]
    # It is told apart from one that this user may not see; the right may have been given since the first question.
    try:
        admin = clients.admin(bootstrap_servers, config)
        return require_topics(admin, bootstrap_servers, [topic], principal=principal_of(config))[topic]
    except TopicNotFoundError:
        raise TopicNotFoundError(
            f"no topic {topic} at {bootstrap_servers}; `penstock dlq ls --all` names the dead-letter topics"
        ) from None


def _may_know_replays(bootstrap_servers: str, config: ClientConfig) -> bool:
    """Tell whether this user may read what was replayed; asked here, for the client waits long where it may not."""
    from penstock import clients
    from penstock.clients.rights import Operation, group_right, missing_rights
    from penstock.dead_letters.reader import REPLAY_GROUP

    return not missing_rights(clients.admin(bootstrap_servers, config), [group_right(REPLAY_GROUP, Operation.DESCRIBE)])


def _require_rights_to_replay(bootstrap_servers: str, config: ClientConfig, topic: str, to: str | None) -> None:
    """Raise `MissingRightError` for all that is missing. Original topics are not known yet: those tell when sent to."""
    from penstock import clients
    from penstock.clients.answers import CONNECT_TIMEOUT_S
    from penstock.clients.rights import Operation, group_right, principal_of, require_rights, topic_right
    from penstock.dead_letters.reader import REPLAY_GROUP

    needed = [topic_right(Operation.READ, topic), group_right(REPLAY_GROUP)]
    needed += [topic_right(Operation.WRITE, to)] if to is not None else []
    admin = clients.admin(bootstrap_servers, config)
    require_rights(admin, f"{topic} cannot be replayed", needed, principal_of(config), CONNECT_TIMEOUT_S)


def _place(text: str) -> tuple[int, int]:
    partition, colon, offset = text.partition(":")
    if not colon or not all(part.isascii() and part.isdigit() and len(part) < 19 for part in (partition, offset)):  # noqa: PLR2004 - digits of 2**63
        raise ConfigurationError(f"{text!r} is no place in a topic; write PARTITION:OFFSET, as in 0:17")
    return int(partition), int(offset)


def _choice(where: list[str] | tuple[str, ...], start: str | None) -> Choice:
    from penstock.dead_letters.replay import Choice

    wanted: dict[str, str] = {}
    for condition in where:
        name, _, value = condition.partition("=")
        if name not in {"exception", "topic"} or not value:
            raise ConfigurationError(f"--where {condition!r} is none; write exception=CLASS or topic=NAME")
        if name in wanted:
            raise ConfigurationError(f"--where {name}=... stands twice; a dead letter has one {name}")
        wanted[name] = value
    place = None if start is None else _place(start)
    return Choice(exception=wanted.get("exception"), topic=wanted.get("topic"), place=place)


def _outcome_as_json(outcome: Outcome, topic: str, *, dry_run: bool) -> dict[str, Any]:
    return {
        "topic": topic,
        "dry_run": dry_run,
        "sent": dict(outcome.sent),
        "sent_before": outcome.sent_before,
        "not_chosen": outcome.not_chosen,
        "left": {why.value: count for why, count in outcome.left.items()},
        "forgetful": sorted(outcome.forgetful),
    }


def _print_outcome(outcome: Outcome, topic: str, *, dry_run: bool) -> None:
    done = "would be sent" if dry_run else "sent"
    for target, count in outcome.sent.most_common():
        typer.echo(f"{count} {done} from {topic} to {target}")
    if not outcome.sent:
        typer.echo(f"nothing {done} from {topic}")
    if outcome.sent_before:
        typer.echo(f"{outcome.sent_before} passed by: sent by an earlier replay (--again sends them too)")
    if outcome.not_chosen:
        typer.echo(f"{outcome.not_chosen} passed by: not chosen")
    for number in sorted(outcome.forgetful):
        typer.echo(
            f"{topic}[{number}]: too many were passed by to remember all that was sent; a later replay repeats some"
        )


def _raise_for_left(outcome: Outcome, topic: str, config: ClientConfig) -> None:
    from penstock.clients.rights import MissingRightError, Operation, principal_of, topic_right

    if outcome.left:
        each = "; ".join(f"{count} {why.value}, as {outcome.first_left[why]}" for why, count in outcome.left.items())
        what = f"{outcome.left.total()} of {topic} could not go anywhere and stay: {each}"
        if outcome.hidden:
            rights = [topic_right(Operation.WRITE, name) for name in sorted(outcome.hidden)]
            raise MissingRightError(what, rights, principal_of(config))
        raise PenstockError(f"{what}; look at them with `penstock dlq show`, or name a topic for them with --to")
