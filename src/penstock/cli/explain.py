"""`penstock explain`: the reason why each partition does not move, for the apps of this machine or for a group."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from penstock.cli.options import Reading
from penstock.cli.output import Result
from penstock.cli.status import ReportTopic, explain_members
from penstock.errors import ConfigurationError, PenstockError
from penstock.fleet_member import REPORTS_TOPIC
from penstock.places import counted

#: Seconds in a handler after which its stack is printed.
_SLOW_S = 3.0


def explain(
    cluster: Reading,
    *,
    group: Annotated[str | None, typer.Argument(metavar="GROUP", help="Only apps of this name.")] = None,
    reports: Annotated[
        bool, typer.Option("--reports", help="All members of the group, on all machines, by their reports.")
    ] = False,
    keys: Annotated[bool, typer.Option("--keys", help="Show the keys of blocking messages.")] = False,
    topic: ReportTopic = REPORTS_TOPIC,
) -> Result:
    """Explain why each partition of the apps on this machine does not move.

    It asks all running apps of this user on this machine, and prints the stack of a slow handler, innermost call last.
    With --reports it reads the reports of all members of a group instead (`penstock run --report`); reports have hashes
    of keys, no keys, and no stacks. Ends with 1 if no app runs on this machine, one does not answer, or a member is
    silent.
    """
    if reports:
        if group is None:
            raise ConfigurationError("--reports shows one group: name it, as in penstock explain sms --reports")
        return explain_members(cluster, topic, group)
    from penstock.consumer.inspect.explain_server import ask_all, folder

    answers = [
        answer for answer in ask_all() if group is None or answer.content is None or answer.content["group"] == group
    ]
    if not any(answer.content for answer in answers):
        silent = "".join(f"; process {answer.process} did not answer" for answer in answers)
        raise PenstockError(
            f"no app{f' called {group}' if group else ''} of this user answers in {folder()}{silent}; run this command "
            "on the app's machine, as the same user, with the same XDG_RUNTIME_DIR"
        )
    lines = []
    for answer in answers:
        if (description := answer.content) is None:
            lines.append(
                f"process {answer.process} did not answer: it is starting or ending, or a handler holds Python's lock"
            )
            continue
        for part in () if keys else (*description["partitions"], *description.get("parked", ())):
            del part["key"]
        lines += _lines(answer.process, description)
    processes = [{"process": answer.process, **(answer.content or {"answers": False})} for answer in answers]
    is_silent = any(answer.content is None for answer in answers)
    return Result(facts={"processes": processes}, lines=lines, code=int(is_silent))


def _lines(process: int, description: dict[str, Any]) -> list[str]:
    partitions = description["partitions"]
    count = sum(partition["partition"] >= 0 for partition in partitions)
    head = f"{description['group']}, process {process}: {counted(count, 'partition')}"
    stacks, texts = dict(description.get("stacks", {})), []
    for part in partitions:
        texts.append(f"  {part['text']}" + (f", key {part['key']}" if part.get("key") else ""))
        if (part["age"] or 0.0) >= _SLOW_S:
            # One call may block many partitions: its stack is printed once.
            texts += [f"    {call}" for call in stacks.pop(part["worker"], ())]
    return [head, *texts, *(f"  {sink['text']}" for sink in description["sinks"])]
