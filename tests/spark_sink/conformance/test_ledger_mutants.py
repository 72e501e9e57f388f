"""Defects planted in the ledgers: each is found by one of the scenarios, on a sink that shows it without Spark."""

# ruff: noqa: ARG005 - what is planted takes the arguments of what it replaces

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import ledger_scenarios as scenarios
import pytest
import sqlalchemy as sa
from sinks_under_test import SinkUnderTest

from penstock.errors import SinkError
from penstock.spark_sink.ledger.rules import LedgerEntry
from penstock.spark_sink.sinks import iceberg_sink, kafka_ledger, kafka_publisher, sink
from penstock.spark_sink.sinks.kafka_ledger import Target
from penstock.spark_sink.sinks.sink import StoredBatches
from penstock.spark_sink.sinks.sql import batch_write, stages
from penstock.spark_sink.sinks.sql import ledger as sql_ledger

Plant = Callable[[pytest.MonkeyPatch], None]


def drops_second_frames(patch: pytest.MonkeyPatch) -> None:
    """A second frame of a batch counts as a repetition of the first."""
    patch.setattr(StoredBatches, "one_call", lambda *given: nullcontext())


def ends_at_last_rows(patch: pytest.MonkeyPatch) -> None:
    """The plan is not compared."""
    patch.setattr(sink, "planned_offsets", lambda *given: {})


def knows_one_position_a_partition(patch: pytest.MonkeyPatch) -> None:
    """Topics share positions."""
    read = sql_ledger._entries

    def shared(connection: sa.Connection, statement: sa.Select[Any]) -> dict[sql_ledger.Owner, sql_ledger.Entries]:
        return {owner: mixed(entries) for owner, entries in read(connection, statement).items()}

    def mixed(found: Mapping[tuple[str, int], LedgerEntry]) -> dict[tuple[str, int], LedgerEntry]:
        highest = {n: max(entry.end for (_, m), entry in found.items() if m == n) for _, n in found}
        return {part: replace(entry, end=highest[part[1]]) for part, entry in found.items()}

    patch.setattr(sql_ledger, "_entries", shared)


def knows_one_position_a_partition_in_kafka(patch: pytest.MonkeyPatch) -> None:
    """The same in the keys of the ledger's topic."""
    for module in (kafka_ledger, kafka_publisher):
        patch.setattr(module, "ledger_key", lambda name, source: json.dumps([name, "any", source[1]]).encode())


def knows_one_query(patch: pytest.MonkeyPatch) -> None:
    """Queries share the ledger of their target."""
    patch.setattr(sql_ledger.Owner, "rows", lambda self, ledger: ledger.c.target == self.target)


def knows_one_query_in_iceberg(patch: pytest.MonkeyPatch) -> None:
    """A commit does not carry the ledger of the other queries forward."""
    real = iceberg_sink._text_of
    patch.setattr(iceberg_sink, "_text_of", lambda ledger: real(dict([list(ledger.items())[-1]])))


def commits_behind_another_writer(patch: pytest.MonkeyPatch) -> None:
    """The library's own tries are left in: they go on from a version whose ledger was not read."""
    patch.setattr(iceberg_sink, "_OWN_TRIES", "another setting")


def shuts_nobody_out(patch: pytest.MonkeyPatch) -> None:
    """Fencing is left out: each task publishes with its own id."""
    numbers = itertools.count()
    patch.setattr(Target, "transactional_id", lambda self, source: f"{self.name}/own-{next(numbers)}")


def does_not_compare(patch: pytest.MonkeyPatch) -> None:
    """Whether the ledger has moved while a batch was staged is not looked at."""
    apply = batch_write.BatchWrite.apply

    def blind(self: Any, connection: Any, tables: Any, _planned: Any, staged: Any, **how: Any) -> Any:
        now = sql_ledger.read_ledger(connection, tables.ledger, self.owner).get(self.owner, {})
        return apply(self, connection, tables, now, staged, **how)

    patch.setattr(batch_write.BatchWrite, "apply", blind)


def counts_lost_tasks(patch: pytest.MonkeyPatch) -> None:
    """Rows copied by a task that was given up as lost count."""
    patch.setattr(stages, "copied_rows", lambda connection, stage, copied: sa.select(stage).subquery())


#: Each defect, a sink that has it, and the scenario that shows it. `test_spark_sink_rules` finds those of
#: the pure rules.
DEFECTS: list[tuple[Plant, str, Callable[[SinkUnderTest], None]]] = [
    (drops_second_frames, "delta", scenarios.a_sink_is_called_twice_in_a_batch),
    (knows_one_position_a_partition, "sqlite", scenarios.topics_and_partitions_have_positions_of_their_own),
    (knows_one_position_a_partition_in_kafka, "kafka", scenarios.topics_and_partitions_have_positions_of_their_own),
    (knows_one_query, "sqlite", scenarios.two_queries_fill_one_target),
    (knows_one_query_in_iceberg, "iceberg", scenarios.two_queries_fill_one_target),
    (commits_behind_another_writer, "iceberg", scenarios.another_copy_commits_in_the_middle_of_a_batch),
    (shuts_nobody_out, "kafka", scenarios.another_copy_commits_in_the_middle_of_a_batch),
    (does_not_compare, "postgresql from executors", scenarios.another_copy_commits_in_the_middle_of_a_batch),
    (counts_lost_tasks, "postgresql from executors", scenarios.a_task_is_retried),
    (ends_at_last_rows, "sqlite", scenarios.a_filter_leaves_rows_out),
]


@pytest.mark.parametrize(
    ("plant", "name", "scenario"), [pytest.param(*defect, id=f"{defect[0].__name__}-{defect[1]}") for defect in DEFECTS]
)
def test_a_defect_of_a_ledger_is_found(
    new_sink: Callable[[str], SinkUnderTest],
    monkeypatch: pytest.MonkeyPatch,
    plant: Plant,
    name: str,
    scenario: Callable[[SinkUnderTest], None],
) -> None:
    plant(monkeypatch)

    with pytest.raises((AssertionError, SinkError)):
        scenario(new_sink(name))
