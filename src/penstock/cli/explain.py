"""`penstock explain`: what holds each partition of the apps that run here, or of all members of a group."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from penstock.cli.options import Reading
from penstock.cli.output import Result, counted
from penstock.cli.status import REPORTS_TOPIC, ReportTopic, explain_members
from penstock.errors import ConfigurationError, PenstockError


def explain(
    cluster: Reading,
    *,
    group: Annotated[str | None, typer.Argument(metavar="GROUP", help="Only apps of this name.")] = None,
    reports: Annotated[
        bool, typer.Option("--reports", help="All members of the group, wherever they run, from their reports.")
    ] = False,
    keys: Annotated[bool, typer.Option("--keys", help="Show the keys of messages that hold a partition.")] = False,
    topic: ReportTopic = REPORTS_TOPIC,
) -> Result:
    """Tell why each partition of the apps that run on this machine does not move.

    It asks every app of this user's that was started, by `penstock run`, `App.run()` or `App.start()`. With --reports
    it reads what the members of a group reported (`penstock run --report`), which holds no keys, but a hash of each.
    Ends with 1 where none runs here, one did not answer, or one is silent.
    """
    if reports:
        if group is None:
            raise ConfigurationError("--reports shows one group: name it, as in penstock explain sms --reports")
        return explain_members(cluster, topic, group)
    from penstock.consumer.inspect.explain_server import ask_all, folder

    answers = [it for it in ask_all() if group is None or it.content is None or it.content["group"] == group]
    if not any(answer.content for answer in answers):
        silent = "".join(f"; process {answer.process} did not answer" for answer in answers)
        raise PenstockError(
            f"no app{f' called {group}' if group else ''} of this user's answers in {folder()}{silent}; run this where "
            "the app runs, as its user, with the same XDG_RUNTIME_DIR"
        )
    lines = []
    for process, said in ((answer.process, answer.content) for answer in answers):
        if said is None:
            lines.append(f"process {process} did not answer: it is starting or ending, or a handler holds Python")
            continue
        for part in () if keys else (*said["partitions"], *said.get("parked", ())):
            del part["key"]
        lines += _lines(process, said)
    processes = [{"process": it.process, **(it.content or {"answers": False})} for it in answers]
    return Result(facts={"processes": processes}, lines=lines, code=int(any(it.content is None for it in answers)))


def _lines(process: int, said: dict[str, Any]) -> list[str]:
    count = sum(partition["partition"] >= 0 for partition in said["partitions"])
    head = f"{said['group']}, process {process}: {counted(count, 'partition')}"
    held = [f"  {it['text']}" + (f", key {it['key']}" if it.get("key") else "") for it in said["partitions"]]
    return [head, *held, *(f"  {it['text']}" for it in said["sinks"])]
