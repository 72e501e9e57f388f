"""The problems of a group, derived from its reports: sentences, the worst first. Pure.

A sentence names the cause and what happens next. A cause that many partitions share is one problem. Texts of reports
may be forged, so they are shown as plain text.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from penstock.consumer import Explanation
from penstock.fleet.reports.group_state import Group, Member
from penstock.fleet.reports.report import Report
from penstock.places import age_text, counted

#: Seconds in a handler after which it is a problem, and after which the problem is bad.
_SLOW_S = 3.0
_HUNG_S = 60.0
#: Seconds after which an undecided transaction is a problem, and the number of checks after which it is bad.
_UNDECIDED_S = 10.0
_CHECKS = 3
_MOST = 60
_EXPLAINED = [field.name for field in fields(Explanation) if field.name != "key"]

#: The levels of problems, the worst first.
BAD, WARN, NOTE = "bad", "warn", "note"
_RANK = {BAD: 0, WARN: 1, NOTE: 2}


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem that needs a look.

    Attributes:
        kind: for example "handler", "parked", "dead letter", "trouble", "paused", "silent", "sink", "transaction".
        level: "bad", "warn" or "note".
        title: the problem and its place, in a few words.
        text: the cause in a sentence, and what happens next.
        member: the member, or empty.
        topic: the topic of the partition, or empty; for a dead letter its original topic.
        partition: the number of the partition, or None.
        offset: the offset of the blocking message, or None.
        age: seconds since it began, or None.
        count: the number of partitions, members or keys with this problem.
        key_hash: the hash of the message's key, or None.
        waiting: the number of messages that wait behind it.
        transaction: id, prefix and operator of the transaction, the arguments of an action.
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
    waiting: int = 0
    transaction: Mapping[str, Any] | None = None


def problems_of(group: Group, member: str | None = None) -> list[Problem]:
    """Return the problems of a group or of one of its members, the worst first; at most 60."""
    found: dict[tuple[Any, ...], Problem] = {}
    for candidate in group.members:
        if member in {None, candidate.report.member}:
            for key, problem in _of_member(candidate):
                found[key] = _joined(found[key], problem) if key in found else problem
    return sorted(found.values(), key=_urgency)[:_MOST]


def as_json(problem: Problem) -> dict[str, Any]:
    """Return a problem as JSON, without empty fields."""
    return {name: value for name, value in asdict(problem).items() if value not in (None, "")}


def _urgency(problem: Problem) -> tuple[int, float, int]:
    return _RANK[problem.level], -(problem.age or 0.0), -problem.waiting


def _joined(problem: Problem, other: Problem) -> Problem:
    longest = problem if (problem.age or 0.0) >= (other.age or 0.0) else other
    level = min(problem.level, other.level, key=_RANK.__getitem__)
    return replace(longest, level=level, count=problem.count + other.count, waiting=problem.waiting + other.waiting)


def _of_member(member: Member) -> Iterator[tuple[tuple[Any, ...], Problem]]:
    """Yield the problems of a member, each with its key: problems with equal keys are joined."""
    report = member.report
    if member.is_replaced:
        return
    if member.is_silent:
        text = (
            f"It sent no report for {age_text(member.age_s)}, though it reports every {report.interval_s:g} s: it "
            "died, is stopped, or reaches no broker. Its partitions go to other members when its session ends."
        )
        title = f"{report.member} is silent"
        silent = Problem("silent", BAD, title, text, report.member, age=member.age_s, waiting=report.known_lag)
        yield ("silent", report.member), silent
        return
    for part in report.partitions:
        if (problem := _of_partition(part, report)) is not None:
            is_single = problem.kind in {"handler", "parked", "held"}
            yield (problem.kind, part["topic"], part["partition"] if is_single else problem.text), problem
    yield from _parked(report)
    yield from _sinks(report)
    yield from _transactions(report)


def _of_partition(part: Mapping[str, Any], report: Report) -> Problem | None:
    """Return the problem of a partition, or None."""
    paused = part["paused"] or ""
    if part["trouble"] is not None:
        kind, level, title, text = "trouble", BAD, "cannot go on", part["trouble"]
    elif part["partition"] < 0:
        level = NOTE if part["state"] == "no partition" else BAD
        kind, title, text = "no partition", "has no partition here", paused
    elif (found := _blocked(part)) is not None:
        kind, level, title, text = found
    elif paused:
        level = WARN if paused.startswith("by the app") else NOTE
        kind, title, text = "paused", "is paused", f"Paused: {paused}"
    else:
        return None
    return Problem(
        kind,
        level,
        f"{_place(part)} {title}",
        _sentence(text),
        report.member,
        part["topic"],
        part["partition"] if part["partition"] >= 0 else None,
        part["blocking_offset"],
        part["age"],
        key_hash=part["key_hash"],
        waiting=part["lag"] or 0,
    )


@dataclass(frozen=True, slots=True)
class _Cause:
    """The reason why a message that blocks a partition does not move.

    Attributes:
        kind: the kind of the `Problem`.
        title: the state of the partition, in a few words.
        text: the sentence, with `{holder}`, the explanation of the partition, or `{detail}`.
        level: the level; it is BAD after `_HUNG_S` in a call.
        after_s: seconds after which it is a problem.
    """

    kind: str
    title: str
    text: str
    level: str = WARN
    after_s: float = 0.0


_CAUSES: Mapping[str, _Cause] = {
    "in handler": _Cause("handler", "waits for its handler", "{holder}, and has not returned", after_s=_SLOW_S),
    "behind a call": _Cause("handler", "waits behind a call", "{holder}", after_s=_SLOW_S),
    "put off": _Cause(
        "handler", "waits for a completion", "{holder}, and its completion has not come", after_s=_SLOW_S
    ),
    "held": _Cause("held", "holds a key for good", "{holder}", BAD),
    "parked": _Cause("parked", "waits for a parked key", "{holder}. Other keys go on"),
    "behind its key": _Cause("parked", "waits behind a parked key", "{detail}"),
    # The text has no offset, so the partitions of a topic share one problem.
    "dead letter": _Cause("dead letter", "cannot write a dead letter", "a message was given up: {detail}", BAD),
    "publishing": _Cause("publishing", "waits for its output", "{detail}", after_s=_SLOW_S),
    "held by rate": _Cause("rate", "is held by a rate", "{holder}", NOTE),
}


def _blocked(part: Mapping[str, Any]) -> tuple[str, str, str, str] | None:
    """Return kind, level, title and text of the reason why the blocking message waits, or None if it is no problem.

    No problem are messages of a retry topic until some seconds after their retry time.
    """
    cause, age, state = _CAUSES.get(part["state"]), part["age"] or 0.0, part["state"]
    if part["blocking_offset"] is None or cause is None or age < cause.after_s:
        return None
    is_late = part["due_in"] == 0 and age >= _SLOW_S
    if state == "parked" and not part["attempt"] and not is_late:
        return None
    text = cause.text.format(holder=explanation(part).holder(), detail=part["detail"] or "it waits for another message")
    if cause.kind in {"handler", "held", "parked"} and part["in_flight"] > 1:
        others = part["in_flight"] - 1
        text += f". {counted(others, 'message')} taken in wait{'' if others > 1 else 's'} with it"
    is_hung = state in {"in handler", "behind a call"} and age >= _HUNG_S
    return cause.kind, BAD if is_hung else cause.level, cause.title, text


def explanation(part: Mapping[str, Any]) -> Explanation:
    """Return the `Explanation` of a partition in a report."""
    return Explanation(**{name: part[name] for name in _EXPLAINED})


def _place(part: Mapping[str, Any]) -> str:
    return part["topic"] if part["partition"] < 0 else f"{part['topic']}:{part['partition']}"


def _parked(report: Report) -> Iterator[tuple[tuple[Any, ...], Problem]]:
    """Yield one problem per handler for its parked keys, except keys that block a watermark: those have a problem."""
    blocking = {(part["topic"], part["partition"], part["blocking_offset"]) for part in report.partitions}
    for part in report.parked:
        handler, topic, state, offset = part["handler"], part["topic"], part["state"], part["offset"]
        if (topic, part["partition"], offset) in blocking or not part["attempt"]:
            continue
        due = part["due_in"]
        retry = "is held" if state == "held" else "waits" if due is None else f"is tried in {age_text(due)}"
        problem = Problem(
            "keys",
            BAD if state == "held" else NOTE,
            f"{handler} has keys of {topic} parked",
            f"{_place(part)}@{offset} failed {counted(part['attempt'], 'time')} and {retry}; other keys go on.",
            report.member,
            topic,
            part["partition"],
            offset,
            part["age"],
            key_hash=part["key_hash"],
        )
        yield ("keys", topic, handler, state), problem


def _sinks(report: Report) -> Iterator[tuple[tuple[Any, ...], Problem]]:
    for sink in report.sinks:
        name, state = sink["name"], sink["state"]
        if state not in {"waiting", "failed"}:
            continue
        why = f": {sink['last_error']}" if sink["last_error"] else ""
        restart = "it is not started again" if state == "failed" else "it is started again"
        when = "" if sink["retry_in"] is None else f" in {age_text(sink['retry_in'])}"
        title, text = f"Spark query {name} is {state}", f"Its query failed{why}; {restart}{when}."
        level = BAD if state == "failed" else WARN
        yield ("sink", name), Problem("sink", level, title, text, report.member, waiting=sink["lag"] or 0)


def _transactions(report: Report) -> Iterator[tuple[tuple[Any, ...], Problem]]:
    for why in report.waits:
        yield ("waits", why), Problem("transaction", BAD, "Transactions wait", _sentence(why), report.member)
    for part in report.transactions:
        age, checks, group = part["age"] or 0.0, part["checks"], part["group"]
        if part["decided"] is not None or age < _UNDECIDED_S:
            continue
        checked = ", and did not decide when it was checked" if checks else ""
        text = (
            f"A transaction of {group} for {part['topics']} has no decision after {age_text(age)} and "
            f"{counted(checks, 'check')}: its producer neither committed nor rolled back{checked}."
        )
        title, level = f"{group} leaves a transaction undecided", BAD if checks >= _CHECKS else WARN
        arguments = {"id": part["id"], "prefix": part["prefix"], "operator": report.operator}
        problem = Problem("transaction", level, title, text, report.member, age=age, transaction=arguments)
        yield ("undecided", group), problem


def _sentence(text: str) -> str:
    """Return a text with a capital and a full stop."""
    return text[:1].upper() + text[1:] + ("" if text.endswith((".", "!", "?")) else ".")
