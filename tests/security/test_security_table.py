"""Each part of penstock names the permissions that it lacks: those of docs/security.md, and no others.

A part begins without any, and is given what it names. When it works it must have named the whole table, and the broker
must have been asked for nothing else. Then permissions are taken away while it runs: it names them, loses nothing, and
goes on by itself when it has them back.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import command_roles
import pytest
import roles
import spark_roles
from pyspark.sql import SparkSession
from rights_table import DOCUMENT, Documented, commanded, covers, differences, documented, filled_in
from roles import Role
from trial import LeastRights
from world import World

from penstock.devbroker import AskedRight
from penstock.spark_sink.queries import supervise
from penstock.transactions.core import quarantine
from penstock.transactions.stores import shard_coordinator
from penstock.transactions.stores.kafka.coordinator import log_upkeep
from rights import Right, give

TABLE = documented(DOCUMENT.read_text())

#: What is taken in `make test` from each part that runs on; `make test-all` takes all of it in turn. What a coordinator
#: does without the permission to publish is in test_security_targets.
TAKEN: dict[str, tuple[str, str] | None] = {
    "app": ("<topic>", "READ"),
    "app with dead letters and retry topics": ("dlq.<topic>", "WRITE"),
    "app that publishes": ("<target>", "WRITE"),
    "app that publishes exactly once": ("penstock.<app>.", "WRITE"),
    "app that reports": ("<reports>", "WRITE"),
    "producer": ("<prefix>.half", "WRITE"),
    "producer that answers checks": ("<prefix>.check.<group>", "READ"),
    "coordinator": None,
    "producer on a SqlStore": None,
    "coordinator of a SqlStore": ("<topic>", "WRITE"),
    "process with a FileStore": ("<prefix>.file.", "WRITE"),
    "member that hears commands": ("<audit>", "WRITE"),
}

#: What is needed at a start, or at the first use, and not again: without it a part that runs does its work.
ONLY_AT_START = {
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

#: Parts that take long.
SHORT = {"app", "producer", "coordinator", "operator who looks at dead letters"}

#: Asked for and refused without harm: brokers from 2.8 on let a producer be idempotent that may write
#: to any topic, and let a topic be created by who may create that topic.
HARMLESS = {("cluster", "IDEMPOTENT_WRITE"), ("cluster", "CREATE")}


@pytest.fixture(autouse=True)
def _hasty(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    """Shorten the intervals of periodic work."""
    if "[coordinator" in request.node.name:
        # Others would miss what is deleted before they may read it.
        monkeypatch.setattr(log_upkeep, "UPKEEP_S", 0.5)
    monkeypatch.setattr(shard_coordinator, "_TRIM_INTERVAL_S", 0.5)
    monkeypatch.setattr(quarantine, "_MAX_RETRY_DELAY_S", 1.0)
    monkeypatch.setattr(supervise, "RIGHT_WAIT_S", 0.5)


def test_every_part_of_the_table_is_run() -> None:
    assert set(TABLE) == {*roles.PARTS, *spark_roles.PARTS}


@pytest.mark.parametrize(
    "part", [pytest.param(part, marks=[] if part in SHORT else [pytest.mark.thorough]) for part in roles.PARTS]
)
def test_a_part_names_what_it_lacks_and_needs_what_the_table_has_and_nothing_else(part: str, world: World) -> None:
    taken = [right for right in TABLE[part].needed if (right.name, right.operation) == TAKEN.get(part)]
    names_all(part, world, *roles.PARTS[part], taken)


@pytest.mark.thorough
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("part", TAKEN)
def test_a_part_that_loses_any_permission_names_it_and_goes_on_when_it_has_it_back(part: str, world: World) -> None:
    names_all(part, world, *roles.PARTS[part], sorted(TABLE[part].needed))


@pytest.mark.thorough
@pytest.mark.parametrize("part", spark_roles.WITHOUT_SPARK)
def test_what_a_part_in_spark_does_names_what_it_lacks_also_in_the_middle_of_a_batch(part: str, world: World) -> None:
    table = replace(TABLE[part], needed=TABLE[part].needed - spark_roles.OF_AN_APP)
    names_all(part, world, spark_roles.make_target, spark_roles.WITHOUT_SPARK[part], sorted(table.needed), table)


@pytest.mark.thorough
@pytest.mark.parametrize("part", spark_roles.PARTS)
def test_a_query_of_spark_names_what_it_lacks_waits_and_goes_on(part: str, world: World, spark: SparkSession) -> None:
    taken = sorted(TABLE[part].needed)
    names_all(part, world, spark_roles.make_target, lambda tried: spark_roles.PARTS[part](tried, spark), taken)


@pytest.mark.parametrize(
    ("part", "prepare", "role"),
    [
        ("app with dead letters and retry topics", roles.make_topic, roles.application_that_gives_up),
        ("KafkaSink", roles.make_topics_of_publisher, spark_roles.publish),
        ("SqlSink with dead letters", roles.make_topic, spark_roles.write_dead_letters),
    ],
)
def test_a_part_whose_topics_are_missing_names_the_permission_to_create_them(
    part: str, prepare: Role, role: Role, world: World
) -> None:
    prepare(world)
    trial = LeastRights(world, TABLE[part], creates=True)
    with trial.applied():
        role(world.tried(trial))


@pytest.mark.parametrize(
    ("part", "role"),
    [
        ("app with dead letters and retry topics", command_roles.run),
        pytest.param("coordinator", command_roles.coordinator, marks=pytest.mark.thorough),
        ("", command_roles.doctor),
    ],
)
def test_a_command_runs_with_what_the_table_has(part: str, role: Role, world: World) -> None:
    table = TABLE.get(part, Documented(frozenset(), frozenset()))
    prepare, _ = roles.PARTS.get(part, (roles.make_topic, role))
    prepare(world)
    give(world.broker, world.user, [filled_in(right, world.names) for right in table.needed])

    role(world)

    missing, _ = differences(table, world.names, asked(world))
    assert missing == []


def names_all(  # noqa: PLR0917 - a part and what is done with it
    part: str, world: World, prepare: Role, role: Role, taken: Iterable[Right], table: Documented | None = None
) -> None:
    """Run a part that begins without any permission, and require that it needed exactly the table.

    Args:
        part: a part of the table.
        world: where.
        prepare: what an administrator does before.
        role: what the part does.
        taken: what it loses while it runs.
        table: its permissions, where they are not all that the document has of the part.
    """
    table = table or TABLE[part]
    only_at_start = {right for right in table.needed if (part, right.name, right.operation) in ONLY_AT_START}
    prepare(world)
    trial = LeastRights(world, table, taken, only_at_start)

    with trial.applied():
        role(world.tried(trial))

    assert differences(table, world.names, asked(world)) == ([], [])


def asked(world: World) -> list[AskedRight]:
    return [right for right in world.broker.asked(world.user) if (right.resource, right.operation) not in HARMLESS]


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


@pytest.mark.parametrize("right", [("READ", "group", "shop"), ("WRITE", "topic", "orders"), ("READ", "topic", "dlq")])
def test_a_row_that_is_missing_is_found(right: tuple[str, str, str]) -> None:
    refused = AskedRight(*right, allowed=False, request="Any")

    assert differences(documented(ROWS)["app"], NAMES, ENOUGH) == ([], [])
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
