"""`penstock dlq`: counts, prints and replays dead letters.

Keys, values, contents of headers and texts of exceptions are printed only with `--payload`. Without it, a stack has
only its places: file, line and function.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from penstock.cli.options import MOST_COUNT, DryRun, Reading
from penstock.cli.output import Result, Table, content_text, log_to_stderr
from penstock.errors import ConfigurationError, PenstockError, TopicNotFoundError
from penstock.places import counted, place_of, place_text, topic_or_place

if TYPE_CHECKING:
    from penstock.dead_letters.reader import DeadLetter, DeadLetterLog
    from penstock.dead_letters.replay import Outcome, Selection

_ROW_LIMIT = 50
#: A place in a stack of Python, or of Java (Spring). Other lines of a stack may be text of an exception.
_STACK_LINE = re.compile(r'\s*File "[^"]*", line \d+(, in \S+)?|\s+at [\w.$/<>@-]+\([\w.$: ]*\)')

TopicOrMessage = Annotated[
    str,
    typer.Argument(metavar="TOPIC[:PARTITION@OFFSET]", help="The dead-letter topic, or one message: dlq.orders:0@17."),
]


def ls(
    cluster: Reading,
    *,
    topic: Annotated[str | None, typer.Argument(metavar="TOPIC", help="The dead-letter topic.")] = None,
    every: Annotated[bool, typer.Option("--all", help="All visible topics with the name dlq.* or *-dlt.")] = False,
    limit: Annotated[int, typer.Option(min=1, help="Number of rows to print, the largest counts first.")] = _ROW_LIMIT,
) -> Result:
    """Count dead letters by origin and exception: all, pending and replayed ones."""
    from penstock.dead_letters.reader import count

    if every == (topic is not None):
        raise ConfigurationError("name one dead-letter topic, or give --all; not both")
    with _log(cluster) as log:
        if topic is None:
            names = [name for name in log.topics() if name.startswith("dlq.") or name.endswith("-dlt")]
        else:
            names = [topic]
        kinds = {}
        for name in names:
            try:
                kinds[name] = count(log, name)
            except TopicNotFoundError:
                if topic is not None:
                    raise  # with --all the topic was deleted meanwhile
    rows = [{"dead_letter_topic": name, **asdict(kind)} for name, found in kinds.items() for kind in found]
    rows.sort(key=lambda row: (-row["count"], row["dead_letter_topic"]))
    lines = [f"{name}: {counted(sum(kind.count for kind in found), 'dead letter')}" for name, found in kinds.items()]
    return Result([Table("kinds", rows, limit=limit)], lines=lines or ["there is no topic called dlq.* or *-dlt"])


def show(
    cluster: Reading,
    *,
    topic: TopicOrMessage,
    last: Annotated[
        int | None,
        typer.Option(
            min=1, max=MOST_COUNT, help="The number of newest dead letters to print, in the order of their time."
        ),
    ] = None,
    payload: Annotated[
        bool, typer.Option("--payload", help="Print key, value, values of headers and the exception's text as well.")
    ] = False,
) -> Result:
    """Print dead letters with origin, exception, stack and headers. Default: the newest one."""
    name, place = topic_or_place(topic)
    if place is not None and last is not None:
        raise ConfigurationError("name one dead letter by TOPIC:PARTITION@OFFSET, or give --last; not both")
    with _log(cluster) as log:
        letters = log.newest(name, last or 1) if place is None else [log.at(name, *place)]
        rows = [row_of(letter, log.was_replayed(letter), payload=payload) for letter in letters]
    notes = [] if rows else [f"{name} is empty"]
    if rows and not payload:
        notes.append("--payload prints keys, values and texts as well")
    return Result([Table("dead_letters", rows, blocks=True)], notes=notes)


def replay(
    cluster: Reading,
    *,
    topic: TopicOrMessage,
    to: Annotated[str | None, typer.Option(help="Send all to this topic, instead of their original topics.")] = None,
    where: Annotated[
        list[str] | None,
        typer.Option(
            help="Only dead letters with exception=CLASS, with or without its module, or topic=ORIGINAL. Repeatable."
        ),
    ] = None,
    start: Annotated[
        str | None, typer.Option("--from", metavar="PARTITION@OFFSET", help="Only this partition, from this offset on.")
    ] = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Number of dead letters to send at most.")] = None,
    again: Annotated[bool, typer.Option("--again", help="Also dead letters that an earlier replay sent.")] = False,
    dry_run: DryRun = False,
) -> Result:
    """Send dead letters back to work, with their keys, values and own headers, at least once.

    The progress is stored in the offsets of group penstock-dlq-replay, and the next replay continues from it. Brokers
    keep it for 7 days after the last replay, unless they are configured otherwise. Ends with 1 if some dead letters
    could not be sent.
    """
    from penstock.dead_letters.replay import Replay

    name, place = topic_or_place(topic)
    selection = _selection(where or (), name, place, start)
    log_to_stderr()
    with _log(cluster) as log:
        work = Replay(log, name, selection, to=to, limit=limit, again=again, dry_run=dry_run)
        failure: PenstockError | None = None
        try:
            work.run()
        except PenstockError as error:  # the messages sent until then are printed first
            failure = error
    return _replay_result(work.outcome, name, failure or work.failure(), dry_run=dry_run)


def _log(cluster: Reading) -> DeadLetterLog:
    from penstock.dead_letters.reader import DeadLetterLog

    cluster.admin("dead letters cannot be read")
    return DeadLetterLog(cluster.servers, cluster.settings)


def _selection(where: Sequence[str], topic: str, place: tuple[int, int] | None, start: str | None) -> Selection:
    from penstock.dead_letters.replay import Selection

    wanted: dict[str, str] = {}
    for condition in where:
        name, _, value = condition.partition("=")
        if name not in {"exception", "topic"} or not value:
            raise ConfigurationError(f"--where {condition!r} is no condition; write exception=CLASS or topic=NAME")
        if name in wanted:
            raise ConfigurationError(f"--where {name}=... is given twice; a dead letter has one {name}")
        wanted[name] = value
    if place is not None and start is not None:
        raise ConfigurationError(f"{topic}:{place[0]}@{place[1]} names one message; omit --from")
    first = place if start is None else place_of(start, topic)[1:]
    return Selection(wanted.get("exception"), wanted.get("topic"), place=first, is_single=place is not None)


def row_of(letter: DeadLetter, was_replayed: bool | None, *, payload: bool) -> dict[str, Any]:
    """Return the printed fields of a dead letter: key, value and texts only with `payload`."""
    from penstock.dead_letters.headers import strip

    origin, own = letter.origin, strip(letter.headers)
    stack = (origin.stack or "").splitlines()
    partition, offset = ("?" if number is None else number for number in (origin.partition, origin.offset))
    return {
        "place": letter.place,
        "at_ms": letter.timestamp_ms,
        "state": None if was_replayed is None else "replayed" if was_replayed else "pending",
        "from": None if origin.topic is None else place_text(origin.topic, partition, offset),
        "group": origin.group,
        "tries": origin.attempts,
        "exception": origin.exception,
        "message": (origin.message or "").splitlines() if payload else None,
        "headers": [f"{header}: {content_text(value)}" if payload else header for header, value in own],
        "stack": [line for line in stack if payload or _STACK_LINE.fullmatch(line)],
        "key": content_text(letter.key) if payload else None,
        "value": content_text(letter.value) if payload else None,
    }


def _replay_result(outcome: Outcome, topic: str, failure: PenstockError | None, *, dry_run: bool) -> Result:
    done = "would be sent" if dry_run else "sent"
    lines = [f"{count} {done} from {topic} to {target}" for target, count in outcome.sent.most_common()]
    lines += [] if outcome.sent else [f"nothing {done} from {topic}"]
    if outcome.sent_before:
        lines.append(f"{outcome.sent_before} left out: sent by an earlier replay (--again sends them too)")
    if outcome.not_chosen:
        lines.append(f"{outcome.not_chosen} left out: not selected")
    for number in sorted(outcome.cut):
        text = "too many were left out to store all of the progress; a later replay repeats some"
        lines.append(f"{place_text(topic, number)}: {text}")
    facts = {
        "topic": topic,
        "dry_run": dry_run,
        "sent": [{"topic": target, "count": count} for target, count in outcome.sent.most_common()],
        "left": [{"reason": why.value, "count": count} for why, count in outcome.unsent.items()],
        "sent_before": outcome.sent_before,
        "not_chosen": outcome.not_chosen,
        "forgetful": sorted(outcome.cut),
    }
    return Result(facts=facts, lines=lines, failure=failure)
