"""What holds a group up, in sentences, the worst first: from reports alone. Pure.

A sentence names the cause and what becomes of it. What many partitions have in common is one problem.
Texts of reports may be anybody's: they are shown as text.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from penstock.fleet.reports.group_state import Group, Member
from penstock.fleet.reports.report import Report

#: Seconds in a handler after which it is a problem, and after which it counts as bad.
_SLOW_S = 3.0
_HUNG_S = 60.0
#: Seconds after which a transaction without a decision is a problem, and the checks after which it counts as bad.
_UNDECIDED_S = 10.0
_CHECKS = 3
_MOST = 60

#: Worst first.
BAD, WARN, NOTE = "bad", "warn", "note"
_RANK = {BAD: 0, WARN: 1, NOTE: 2}


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that needs a look.

    Attributes:
        kind: what it is, as "handler", "parked", "dead letter", "trouble", "paused", "silent", "sink", "transaction".
        level: "bad", "warn" or "note".
        title: what and where, in a few words.
        text: the cause in a sentence, with what becomes of it.
        member: whose, or empty.
        topic: of the partition, or empty; a dead letter's is its own topic, not that of dead letters.
        partition: its number, or None.
        offset: of the message that blocks it, or None.
        age: seconds since it began, or None.
        count: how many partitions, members or keys have it.
        key_hash: what stands for the message's key, or None.
        stack: of the handler, where reports have it.
        waiting: messages that wait behind it.
        transaction: id, prefix and operator of the transaction, as an action wants them.
    """

    kind: str
    level: str
    title: str
    text: str
    member: str = ""
    topic: str = ""
    partition: int | None = None
    offset: int | None = None
    age: float | None = None
    count: int = 1
    key_hash: str | None = None
    stack: str | None = field(default=None, repr=False)
    waiting: int = 0
    transaction: Mapping[str, Any] | None = None


def problems_of(group: Group, member: str | None = None) -> list[Problem]:
    """Return what holds a group or one of its members up, the worst first; at most 60."""
    found: dict[tuple[Any, ...], Problem] = {}
    for seen in group.members:
        if member in {None, seen.report.member}:
            for what, problem in _of_member(seen):
                former = found.get(what)
                found[what] = problem if former is None else _joined(former, problem)
    return sorted(found.values(), key=_urgency)[:_MOST]


def as_json(problem: Problem, *, with_stack: bool = False) -> dict[str, Any]:
    """Return a problem as JSON has it, without what it has not; instead of a stack null, unless that is asked for."""
    shown = {name: value for name, value in asdict(problem).items() if value not in (None, "")}
    if "stack" in shown and not with_stack:
        shown["stack"] = None
    return shown


def _urgency(problem: Problem) -> tuple[int, float, int]:
    return _RANK[problem.level], -(problem.age or 0.0), -problem.waiting


def _joined(problem: Problem, other: Problem) -> Problem:
    longest = problem if (problem.age or 0.0) >= (other.age or 0.0) else other
    level = min(problem.level, other.level, key=_RANK.__getitem__)
    return replace(longest, level=level, count=problem.count + other.count, waiting=problem.waiting + other.waiting)


def _of_member(member: Member) -> Iterator[tuple[tuple[Any, ...], Problem]]:
    report = member.report
    if member.is_replaced:
        return
    if member.is_silent:
        yield (
            ("silent", report.member),
            Problem(
                "silent",
                BAD,
                f"{report.member} is silent",
                f"Nothing came from it for {seconds(member.age_s)}, though it reports every {report.interval_s:g} s: "
                "it died, is stopped, or reaches no broker. Its partitions go to other members when its session ends.",
                report.member,
                age=member.age_s,
                waiting=report.known_lag,
            ),
        )
        return
    held = {(part["topic"], part["partition"], part["blocking_offset"]) for part in report.partitions}
    for part in report.partitions:
        if (problem := _of_partition(part, report)) is not None:
            alone = problem.kind in {"handler", "parked", "held"}
            place = (part["topic"], part["partition"]) if alone else (part["topic"], problem.text)
            yield (problem.kind, *place), problem
    yield from _parked(report, held)
    yield from _sinks(report)
    yield from _transactions(report)


def _of_partition(part: Mapping[str, Any], report: Report) -> Problem | None:
    """Return what is the matter with a partition, or None."""
    place = part["topic"] if part["partition"] < 0 else f"{part['topic']}:{part['partition']}"
    common: dict[str, Any] = {
        "member": report.member,
        "topic": part["topic"],
        "partition": part["partition"] if part["partition"] >= 0 else None,
        "offset": part["blocking_offset"],
        "age": part["age"],
        "key_hash": part["key_hash"],
        "stack": part["stack"],
        "waiting": part["lag"] or 0,
    }
    if part["trouble"] is not None:
        return Problem("trouble", BAD, f"{place} cannot go on", _sentence(part["trouble"]), **common)
    if part["partition"] < 0:
        level = NOTE if part["state"] == "no partition" else BAD
        return Problem("no partition", level, f"{place}: no partition here", _sentence(part["paused"] or ""), **common)
    found = _blocked(part, place, common)
    if found is None and part["paused"] is not None:
        level = WARN if part["paused"].startswith("by the app") else NOTE
        return Problem("paused", level, f"{place} is paused", _sentence(f"Paused: {part['paused']}"), **common)
    return found


def _blocked(part: Mapping[str, Any], place: str, common: Mapping[str, Any]) -> Problem | None:
    """Return what the message that holds a partition waits for, where that is not its turn."""
    cause = _CAUSES.get(part["state"])
    if part["blocking_offset"] is None or cause is None:
        return None
    kind, title, tell = cause
    found = tell(part)
    if found is None:
        return None
    level, text = found
    if kind in {"handler", "held", "parked"} and part["in_flight"] > 1:
        text += f" {part['in_flight'] - 1} messages taken in wait with it."
    return Problem(kind, level, f"{place} {title}", text, **common)


#: A level and a sentence, or None where it is no problem.
_Told = tuple[str, str] | None


def _in_handler(part: Mapping[str, Any]) -> _Told:
    age = part["age"] or 0.0
    text = f"Handler {part['handler']} has had offset {part['blocking_offset']} for {seconds(age)} on {part['worker']}"
    text += f" and has not returned{_over_limit(part)}."
    return None if age < _SLOW_S else (BAD if age >= _HUNG_S else WARN, text)


def _over_limit(part: Mapping[str, Any]) -> str:
    return f"; it was over its time limit {_times(part['over_time_limit'])}" if part["over_time_limit"] else ""


def _behind_call(part: Mapping[str, Any]) -> _Told:
    age = part["age"] or 0.0
    text = f"Offset {part['blocking_offset']} is queued {part['detail'] or 'behind a call that has not returned'}."
    return None if age < _SLOW_S else (BAD if age >= _HUNG_S else WARN, text)


def _held(part: Mapping[str, Any]) -> _Told:
    text = f"Offset {part['blocking_offset']} exhausted its tries ({part['attempt']} failed)"
    return BAD, f"{text} and handler {part['handler']} holds its key: mend the cause and start the app again."


def _waits_for_try(part: Mapping[str, Any]) -> _Told:
    due, times = part["due_in"], part["attempt"]
    again = "no time is set for the next try" if due is None else f"the next try is in {seconds(due)}"
    text = f"Handler {part['handler']} failed {_times(times)} at offset {part['blocking_offset']}{_over_limit(part)}"
    return (WARN, f"{text}: its key is parked, and {again}.") if times else None


def _put_off(part: Mapping[str, Any]) -> _Told:
    age = part["age"] or 0.0
    text = f"Handler {part['handler']} put the completion of offset {part['blocking_offset']} off {seconds(age)} ago"
    return None if age < _SLOW_S else (WARN, f"{text}, and it has not come.")


def _dead_letter(part: Mapping[str, Any]) -> _Told:
    # Without the offset: so all of a topic are one problem.
    return (
        BAD,
        f"A message was given up: {part['detail'] or 'it is on its way to another topic'}. Its offset is held.",
    )


def _behind(part: Mapping[str, Any]) -> _Told:
    return WARN, _sentence(part["detail"] or "it waits for a parked message of its key")


def _by_rate(part: Mapping[str, Any]) -> _Told:
    return (
        NOTE,
        f"Offset {part['blocking_offset']} waits for the rate of {part['handler']}, {part['rate'] or 0:g}/s.",
    )


def _publishing(part: Mapping[str, Any]) -> _Told:
    return (WARN, _sentence(part["detail"])) if part["detail"] else None


_CAUSES: Mapping[str, tuple[str, str, Callable[[Mapping[str, Any]], _Told]]] = {
    "in handler": ("handler", "waits for its handler", _in_handler),
    "behind a call": ("handler", "waits behind a call", _behind_call),
    "held": ("held", "holds a key for good", _held),
    "parked": ("parked", "waits for a parked key", _waits_for_try),
    "put off": ("handler", "waits for a completion", _put_off),
    "dead letter": ("dead letter", "cannot write a dead letter", _dead_letter),
    "behind its key": ("parked", "waits behind a parked key", _behind),
    "held by rate": ("rate", "is held by a rate", _by_rate),
    "publishing": ("publishing", "waits for its results", _publishing),
}


def _parked(report: Report, held: Iterable[tuple[str, int, int | None]]) -> Iterator[tuple[tuple[Any, ...], Problem]]:
    """Return parked keys whose head does not hold a watermark, for those are problems already: one for each handler."""
    for part in report.parked:
        if (part["topic"], part["partition"], part["offset"]) in held or not part["attempt"]:
            continue
        due = part["due_in"]
        again = "is held" if part["state"] == "held" else "waits" if due is None else f"is tried in {seconds(due)}"
        yield (
            ("keys", part["topic"], part["handler"], part["state"]),
            Problem(
                "keys",
                BAD if part["state"] == "held" else NOTE,
                f"{part['handler']} has keys of {part['topic']} parked",
                f"Offset {part['offset']} of {part['topic']}:{part['partition']} failed {_times(part['attempt'])} and "
                f"{again}; other keys go on.",
                report.member,
                part["topic"],
                part["partition"],
                part["offset"],
                part["age"],
                key_hash=part["key_hash"],
            ),
        )


def _sinks(report: Report) -> Iterator[tuple[tuple[Any, ...], Problem]]:
    for sink in report.sinks:
        if sink["state"] in {"waiting", "failed"}:
            then = "it is not started again" if sink["state"] == "failed" else "it is started again"
            if sink["retry_in"] is not None:
                then += f" in {seconds(sink['retry_in'])}"
            why = f": {sink['last_error']}" if sink["last_error"] else ""
            text = f"Its query failed{why}; {then}."
            level = BAD if sink["state"] == "failed" else WARN
            title = f"Spark query {sink['name']} is {sink['state']}"
            yield ("sink", sink["name"]), Problem("sink", level, title, text, report.member, waiting=sink["lag"] or 0)


def _transactions(report: Report) -> Iterator[tuple[tuple[Any, ...], Problem]]:
    for why in report.waits:
        yield ("waits", why), Problem("transaction", BAD, "Transactions wait", _sentence(why), report.member)
    for part in report.transactions:
        age = part["age"] or 0.0
        if part["decided"] is not None or age < _UNDECIDED_S:
            continue
        text = (
            f"A transaction of {part['group']} for {part['topics']} has no decision after {seconds(age)} and "
            f"{part['checks']} checks: its producer neither commits nor rolls back, nor decides when it is asked."
        )
        yield (
            ("undecided", part["group"]),
            Problem(
                "transaction",
                BAD if part["checks"] >= _CHECKS else WARN,
                f"{part['group']} leaves a transaction undecided",
                text,
                report.member,
                age=age,
                transaction={"id": part["id"], "prefix": part["prefix"], "operator": report.operator},
            ),
        )


def _times(number: int) -> str:
    return "once" if number == 1 else f"{number} times"


def _sentence(text: str) -> str:
    """Return a text with a capital and a full stop."""
    return text[:1].upper() + text[1:] + ("" if text.endswith((".", "!", "?")) else ".")


def seconds(number: float) -> str:
    """Return a duration as people write it."""
    below, part, unit = next(row for row in _UNITS if number < row[0])
    return f"{number / part:.{1 if below in _PRECISE else 0}f} {unit}"


#: Durations below so many seconds are written in parts of so many, of that name; some with a decimal.
_UNITS = ((10.0, 1, "s"), (120.0, 1, "s"), (7_200.0, 60, "min"), (float("inf"), 3_600, "h"))
_PRECISE = frozenset({10.0, float("inf")})
