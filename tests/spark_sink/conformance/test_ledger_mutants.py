"""Defects planted in the ledgers: each is found by one of the scenarios, on a sink that shows it without Spark."""

# ruff: noqa: ARG005 - what is planted takes the arguments of what it replaces

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Mapping
from typing import Any

import ledger_scenarios as scenarios
import pytest
import sqlalchemy as sa
from sinks_under_test import SinkUnderTest

from penstock.errors import SinkError
from penstock.spark_sink.ledger import kafka_ledger, kafka_publisher, sql_ledger
from penstock.spark_sink.ledger.state import LedgerState, Span
from penstock.spark_sink.sinks import delta_sink, kafka_publication
from penstock.spark_sink.sinks.sql import batch_transaction, batch_write
from penstock.spark_sink.sinks.sql.batch_transaction import BatchTransaction
from penstock.spark_sink.sinks.sql.rows import staging

Spans = Mapping[tuple[str, int], Span]
Applied = Mapping[tuple[str, int], int]
Plant = Callable[[pytest.MonkeyPatch], None]

#: Where each sink has the rules of `ledger.state`, which it imports by name.
RULES = (batch_transaction, delta_sink, kafka_publisher)


def everywhere(patch: pytest.MonkeyPatch, name: str, planted: Callable[..., Any]) -> None:
    for module in RULES:
        if hasattr(module, name):
            patch.setattr(module, name, planted)


def does_not_advance(patch: pytest.MonkeyPatch) -> None:
    """A batch does not move the ledger."""
    everywhere(patch, "advanced", lambda applied, batch: {})


def advances_to_its_last_row(patch: pytest.MonkeyPatch) -> None:
    """The next offset is that of the last row."""
    everywhere(patch, "advanced", lambda applied, batch: {part: span.last for part, span in batch.items()})


def goes_back(patch: pytest.MonkeyPatch) -> None:
    """A batch below the ledger moves it back."""
    everywhere(patch, "advanced", lambda applied, batch: {part: span.last + 1 for part, span in batch.items()})


def counts_rows(patch: pytest.MonkeyPatch) -> None:
    """The next offset is found by counting, as if offsets had no holes."""
    everywhere(patch, "advanced", lambda applied, batch: {part: applied.get(part, 0) + 1 for part in batch})


def drops_late_rows(patch: pytest.MonkeyPatch) -> None:
    """Rows that come late are taken for repeated ones."""
    everywhere(patch, "refuse_late", lambda *given: None)


def takes_another_run_for_its_own(patch: pytest.MonkeyPatch) -> None:
    """What another copy has stored makes rows late."""
    refuse: Any = batch_transaction.refuse_late
    everywhere(
        patch,
        "refuse_late",
        lambda batches, repeated, run, *more: refuse(
            {part: f"{run}/{batch.partition('/')[2]}" for part, batch in batches.items()}, repeated, run, *more
        ),
    )


def knows_one_position_a_partition(patch: pytest.MonkeyPatch) -> None:
    """Topics share positions."""
    read = sql_ledger._state

    def shared(connection: sa.Connection, statement: sa.Select[Any]) -> LedgerState:
        found = read(connection, statement)
        highest = {n: max(at for (_, m), at in found.offsets.items() if m == n) for _, n in found.offsets}
        return LedgerState({part: highest[part[1]] for part in found.offsets}, found.batches)

    patch.setattr(sql_ledger, "_state", shared)


def knows_one_position_a_partition_in_kafka(patch: pytest.MonkeyPatch) -> None:
    """The same in the keys of the ledger's topic."""
    for module in (kafka_ledger, kafka_publisher):
        patch.setattr(module, "ledger_key", lambda name, source: json.dumps([name, source[1]]).encode())


def knows_one_query(patch: pytest.MonkeyPatch) -> None:
    """Queries share the ledger of their target."""
    patch.setattr(sql_ledger.Owner, "rows", lambda self, ledger: ledger.c.target == self.target)


def shuts_nobody_out(patch: pytest.MonkeyPatch) -> None:
    """Fencing is left out: each task publishes by an id of its own."""
    numbers = itertools.count()
    patch.setattr(kafka_publication, "slot_id", lambda name, source: f"{name}/own-{next(numbers)}")


def does_not_compare(patch: pytest.MonkeyPatch) -> None:
    """Whether the ledger has moved while a batch was staged is not looked at."""
    apply = batch_write.BatchWrite._apply_staged

    def blind(self: Any, connection: sa.Connection, tables: Any, _state: object, *more: Any, **how: Any) -> bool:
        with connection.begin():
            now = sql_ledger.read_ledger(connection, tables.ledger, self.transaction.owner)
        return apply(self, connection, tables, now, *more, **how)

    patch.setattr(batch_write.BatchWrite, "_apply_staged", blind)


def counts_lost_tasks(patch: pytest.MonkeyPatch) -> None:
    """What a task has copied that was given up for lost counts."""
    patch.setattr(staging, "staged_rows", lambda stage, attempts: sa.select(stage).subquery())
    patch.setattr(staging, "require_copied", lambda *given: None)


def takes_a_lost_answer_for_another_call(patch: pytest.MonkeyPatch) -> None:
    """A batch that is tried again after its commit finds itself in the ledger, and is refused."""
    never = property(lambda self: False, lambda self, value: None)
    patch.setattr(BatchTransaction, "is_commit_requested", never)


#: Each defect, a sink that has it, and the scenario that shows it.
DEFECTS: list[tuple[Plant, str, Callable[[SinkUnderTest], None]]] = [
    (does_not_advance, "sqlite", scenarios.a_batch_is_repeated_by_a_new_run),
    (does_not_advance, "delta", scenarios.a_batch_is_repeated_by_a_new_run),
    (advances_to_its_last_row, "sqlite", scenarios.a_checkpoint_is_lost),
    (goes_back, "sqlite", scenarios.another_copy_is_behind),
    (goes_back, "delta", scenarios.another_copy_is_behind),
    (counts_rows, "sqlite", scenarios.offsets_have_holes),
    (drops_late_rows, "sqlite", scenarios.rows_come_below_a_later_batch),
    (drops_late_rows, "delta", scenarios.a_sink_is_called_twice_in_a_batch),
    (drops_late_rows, "kafka", scenarios.rows_come_below_a_later_batch),
    (takes_another_run_for_its_own, "sqlite", scenarios.another_copy_is_ahead),
    (knows_one_position_a_partition, "sqlite", scenarios.topics_and_partitions_have_positions_of_their_own),
    (knows_one_position_a_partition_in_kafka, "kafka", scenarios.topics_and_partitions_have_positions_of_their_own),
    (knows_one_query, "sqlite", scenarios.two_queries_fill_one_target),
    (shuts_nobody_out, "kafka", scenarios.another_copy_commits_in_the_middle_of_a_batch),
    (does_not_compare, "postgresql from executors", scenarios.another_copy_commits_in_the_middle_of_a_batch),
    (counts_lost_tasks, "postgresql from executors", scenarios.a_task_is_retried),
    (takes_a_lost_answer_for_another_call, "postgresql from the driver", scenarios.the_answer_to_a_commit_is_lost),
]


@pytest.mark.parametrize(
    ("plant", "name", "scenario"), [pytest.param(*one, id=f"{one[0].__name__}-{one[1]}") for one in DEFECTS]
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
