"""Each part of penstock runs with the rights that docs/security.md names for it: none is missing, and none too many."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import command_roles
import pytest
import roles
import spark_roles
from pyspark.sql import SparkSession
from rights_table import DOCUMENT, Documented, as_table, commanded, covers, differences, documented, filled_in
from roles import Role
from world import World

from penstock.devbroker import AskedRight
from rights import Right, give

TABLE = documented(DOCUMENT.read_text())

#: Parts that take long.
LONG = {"operator who looks", "operator who decides", "process with a FileStore"}

#: Commands that do what parts of the table do, and need no more; where one needs nothing it is no part.
COMMANDS: dict[str, tuple[str, Role]] = {
    "penstock run": ("app with dead letters and retry topics", command_roles.run),
    "penstock coordinator": ("coordinator", command_roles.coordinator),
    "penstock doctor": ("", command_roles.doctor),
}

#: Asked for and refused without harm: brokers from 2.8 on let a producer be idempotent that may write
#: to any topic, and let a topic be created by who may create that topic.
HARMLESS = {("cluster", "IDEMPOTENT_WRITE"), ("cluster", "CREATE")}


def test_every_part_of_the_table_is_run() -> None:
    assert set(TABLE) == {*roles.PARTS, *spark_roles.PARTS}


@pytest.mark.parametrize(
    ("user", "parts"),
    [
        ("shop", ["producer", "producer that answers checks"]),
        ("coordinator", ["coordinator"]),
        ("ops", ["operator who looks", "operator who decides"]),
    ],
)
def test_the_commands_give_what_the_table_names(user: str, parts: list[str]) -> None:
    names = {"prefix": "penstock", "group": "orders", "topic": "orders"}
    named = {filled_in(right, names) for part in parts for right in TABLE[part].needed}
    contained = {
        right
        for right in named
        if right.operation == "DESCRIBE"
        and any(covers(other, asking_for(right)) for other in named if other.operation != "DESCRIBE")
    }

    assert commanded(DOCUMENT.read_text())[user] == named - contained


@pytest.mark.parametrize(
    "part", [pytest.param(part, marks=[pytest.mark.chaos] if part in LONG else []) for part in roles.PARTS]
)
def test_a_part_runs_with_the_rights_of_the_table_and_needs_each_of_them(part: str, world: World) -> None:
    with least_rights(part, world, roles.PREPARATIONS.get(part, roles.make_topic)):
        roles.PARTS[part](world)


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_runs_with_the_rights_of_the_table(command: str, world: World) -> None:
    part, role = COMMANDS[command]
    with least_rights(part, world, roles.PREPARATIONS.get(part, roles.make_topic), is_whole_path=False):
        role(world)


# Beside a Spark that starts for them; tests/spark_sink has the rights of the same parts without its start.
@pytest.mark.chaos
@pytest.mark.parametrize("part", spark_roles.PARTS)
def test_a_part_in_spark_runs_with_the_rights_of_the_table_and_needs_each_of_them(
    part: str, world: World, spark: SparkSession
) -> None:
    with least_rights(part, world, spark_roles.make_target):
        spark_roles.PARTS[part](world, spark)


@contextmanager
def least_rights(part: str, world: World, prepare: Role, *, is_whole_path: bool = True) -> Iterator[None]:
    """Give the rights of the table while a part runs, and compare them afterwards with what was asked for.

    Args:
        part: a part of the table, or another one, which needs nothing.
        world: where.
        prepare: what an administrator does before.
        is_whole_path: whether all that the part ever needs is asked for.
    """
    table = TABLE.get(part, Documented(frozenset(), frozenset()))
    prepare(world)
    give(world.broker, world.user, [filled_in(right, world.names) for right in table.needed])
    try:
        yield
    finally:
        looked_up = world.broker.asked(world.user)
        asked = [one for one in looked_up if (one.resource, one.operation) not in HARMLESS]
        print(f"{part} asked the broker for:\n{as_table(part, world.names, asked)}")  # noqa: T201 - shown if it fails
    missing, superfluous = differences(table, world.names, asked)
    assert missing == [], as_table(part, world.names, missing)
    assert not is_whole_path or superfluous == []


def asking_for(right: Right) -> AskedRight:
    return AskedRight(right.operation, right.resource, right.name, allowed=True, request="Any")


ROWS = """
| part | on | name | operations |
|---|---|---|---|
| app | topic | `<topic>` | READ (DESCRIBE_CONFIGS) |
| app | transactional id | `<app>.*` | WRITE |

| other | table |
"""
NAMES = {"topic": "orders", "app": "shop"}
ENOUGH = [
    AskedRight("DESCRIBE", "topic", "orders", allowed=True, request="Metadata"),
    AskedRight("READ", "topic", "orders", allowed=True, request="Fetch"),
    AskedRight("DESCRIBE_CONFIGS", "topic", "orders", allowed=False, request="DescribeConfigs"),
    AskedRight("WRITE", "transactional_id", "shop.1", allowed=True, request="InitProducerId"),
]


def test_a_table_that_names_what_was_asked_for_has_no_differences() -> None:
    assert differences(documented(ROWS)["app"], NAMES, ENOUGH) == ([], [])


@pytest.mark.parametrize("right", [("READ", "group", "shop"), ("WRITE", "topic", "orders"), ("READ", "topic", "dlq")])
def test_a_row_that_is_missing_is_found(right: tuple[str, str, str]) -> None:
    refused = AskedRight(*right, allowed=False, request="Any")

    assert differences(documented(ROWS)["app"], NAMES, [*ENOUGH, refused]) == ([refused], [])


@pytest.mark.parametrize(
    ("row", "superfluous"),
    [
        ("| app | group | `<app>` | READ |", Right("group", "shop", "READ")),
        ("| app | topic | `<topic>` | WRITE |", Right("topic", "orders", "WRITE")),
        ("| app | topic | `<topic>` | DESCRIBE |", Right("topic", "orders", "DESCRIBE")),
        ("| app | topic | `*` | WRITE |", Right("topic", "", "WRITE", is_prefix=True)),
    ],
)
def test_a_row_too_many_is_found(row: str, superfluous: Right) -> None:
    table = documented(ROWS.replace("|---|---|---|---|", f"|---|---|---|---|\n{row}"))

    assert differences(table["app"], NAMES, ENOUGH) == ([], [superfluous])
