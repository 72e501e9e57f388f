"""Each right of docs/security.md taken away in turn: who misses it says so, loses nothing, and goes on when it has it.

The cases are the rows of the table, so that a new row is one more case. What stands in brackets there is taken away all
at once in `test_security_table`, where each part does its work without.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

import pytest
import roles
import spark_roles
from pyspark.sql import SparkSession
from rights_table import DOCUMENT, documented, filled_in
from taken_away import TOLD_S, TakenAway
from world import World

from penstock.spark_sink.queries import restarts
from penstock.transactions.coordinator.partitions import log_upkeep
from penstock.transactions.stores.relay import coordinator as relay_coordinator
from penstock.transactions.writing import target_quarantine
from rights import Right

TABLE = documented(DOCUMENT.read_text())

AT_ITS_START, WHILE_IT_RUNS = "at its start", "while it runs"

#: Commands, which do one thing and end.
ONE_SHOT = {
    "operator who looks",
    "operator who decides",
    "operator who looks at dead letters",
    "operator who replays dead letters",
    "operator who looks at offsets",
    "operator who moves offsets",
    "operator who looks at reports",
    "dashboard that commands members",
}

#: What is needed at a start, or at the first use, and not again: without it the part that runs does its work.
ONLY_AT_ITS_START = {
    ("producer", "<prefix>.check", "DESCRIBE"),
    ("producer", "<prefix>.discarded", "DESCRIBE"),
    ("producer", "<topic>", "DESCRIBE"),
    ("producer that answers checks", "<prefix>.done", "DESCRIBE"),
    ("producer that answers checks", "<prefix>.discarded", "DESCRIBE"),
    ("producer that answers checks", "<topic>", "DESCRIBE"),
    ("coordinator", "<prefix>.half", "DESCRIBE_CONFIGS"),
    ("coordinator", "<prefix>.op", "DESCRIBE_CONFIGS"),
    ("coordinator", "<prefix>.done", "DESCRIBE_CONFIGS"),
    ("producer on a SqlStore", "<topic>", "DESCRIBE"),
    ("coordinator of a SqlStore", "<prefix>.sql-", "READ"),
    ("process with a FileStore", "<prefix>.file.", "READ"),
}

#: Cases that are not left to `make chaos`.
QUICK = {
    ("app", "<topic>", "READ", WHILE_IT_RUNS),
    ("app with dead letters and retry topics", "dlq.<topic>", "WRITE", WHILE_IT_RUNS),
    ("app that publishes", "<target>", "WRITE", WHILE_IT_RUNS),
    ("app that publishes exactly once", "penstock.<app>.", "WRITE", AT_ITS_START),
    ("operator who replays dead letters", "<topic>", "WRITE", AT_ITS_START),
    ("operator who looks at offsets", "<topic>", "READ", AT_ITS_START),
    ("member that hears commands", "<audit>", "WRITE", AT_ITS_START),
    ("producer on a SqlStore", "<topic>", "DESCRIBE", AT_ITS_START),
}


def cases(parts: Iterable[str]) -> list[object]:
    """Return a case for each right that the table calls needed, and each time at which it can be taken away."""
    return [
        case(part, right, when)
        for part in parts
        for right in sorted(TABLE[part].needed)
        for when in ([AT_ITS_START] if part in ONE_SHOT else [AT_ITS_START, WHILE_IT_RUNS])
    ]


def case(part: str, right: Right, when: str) -> object:
    words = f"{part} {right.resource} {right.name}{'*' if right.is_prefix else ''} {right.operation} {when}"
    marks = [] if (part, right.name, right.operation, when) in QUICK else [pytest.mark.chaos]
    return pytest.param(part, right, when, id=re.sub(r"[^\w.*]+", "-", words), marks=marks)


@pytest.fixture(autouse=True)
def _hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is done every few seconds is done more often."""
    monkeypatch.setattr(log_upkeep, "UPKEEP_S", 0.5)
    monkeypatch.setattr(relay_coordinator, "_TRIM_S", 0.5)
    monkeypatch.setattr(target_quarantine, "_LAST_S", 1.0)
    monkeypatch.setattr(restarts, "RIGHT_WAIT_S", 0.5)


@pytest.mark.parametrize(("part", "right", "when"), cases(roles.PARTS))
def test_a_part_says_which_right_it_misses_and_does_its_work_when_it_is_given(
    part: str, right: Right, when: str, world: World
) -> None:
    roles.PREPARATIONS.get(part, roles.make_topic)(world)
    without(part, right, when, world, roles.PARTS[part])


@pytest.mark.parametrize(("part", "right", "when"), cases(spark_roles.PARTS))
def test_a_part_in_spark_says_which_right_it_misses_and_does_its_work_when_it_is_given(
    part: str, right: Right, when: str, world: World, spark: SparkSession
) -> None:
    spark_roles.make_target(world)
    without(part, right, when, world, lambda tried: spark_roles.PARTS[part](tried, spark))


def without(part: str, right: Right, when: str, world: World, role: Callable[[World], None]) -> None:
    """Run a part without a right, and give it when it was named."""
    is_needed = when == AT_ITS_START or (part, right.name, right.operation) not in ONLY_AT_ITS_START
    trial = TakenAway(
        world,
        TABLE[part],
        filled_in(right, world.names),
        while_it_runs=when == WHILE_IT_RUNS,
        is_needed=is_needed,
    )
    with trial.applied():
        role(world.tried(trial))
    way = "by running again" if trial.is_done_again else "by itself"
    name = f"{right.resource} {right.name}{'*' if right.is_prefix else ''}"
    told = trial.text.split("; an administrator")[0].replace(world.user.name, "<>")
    row = part, name, right.operation, when, told, way, f"{trial.seconds:.1f} s"
    print("|", *row, sep=" | ")  # noqa: T201 - `pytest -s` shows what each part says
    assert trial.is_said == is_needed
    assert is_needed or not trial.is_refused()
    assert trial.seconds < TOLD_S
    assert trial.strange == set()
