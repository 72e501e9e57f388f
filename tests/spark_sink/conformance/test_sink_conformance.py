"""The promises of every sink, with all events of its query."""

from __future__ import annotations

from collections.abc import Callable

import ledger_scenarios as scenarios
import pytest
from ledger_scenarios import SCENARIOS, rows, the_answer_to_a_commit_is_lost
from sinks_under_test import IN_PROCESS, SINKS, SinkUnderTest

#: Where one scenario is enough in `make test`, for another kind of the same sink plays all.
ALIKE = ("postgresql from the driver", "mariadb from the driver", "mariadb from executors")
#: What the rules decide, whatever a ledger is written in: through Kafka's transactions, which take seconds, in the long
#: runs only.
BY_RULES = (
    scenarios.a_checkpoint_is_lost,
    scenarios.offsets_have_holes_and_a_batch_has_no_rows,
    scenarios.rows_come_below_a_later_batch,
    scenarios.another_copy_is_ahead,
    scenarios.another_copy_is_behind,
    scenarios.a_filter_leaves_rows_out,
    scenarios.a_topic_was_created_again,
    scenarios.an_operator_changes_the_ledger,  # tests/cli plays it in Kafka
)


def is_thorough(name: str, scenario: Callable[[SinkUnderTest], None]) -> bool:
    return scenario in BY_RULES if name == "kafka" else name in ALIKE and scenario is not SCENARIOS[0]


@pytest.mark.parametrize(
    ("name", "scenario"),
    [
        pytest.param(
            name,
            scenario,
            id=f"{scenario.__name__}-{name}",
            marks=[pytest.mark.thorough] if is_thorough(name, scenario) else [],
        )
        for scenario in SCENARIOS
        for name in SINKS
        if scenario is not the_answer_to_a_commit_is_lost or name not in IN_PROCESS
    ],
)
def test_rows_stand_once_or_the_sink_says_why_not_when(
    new_sink: Callable[[str], SinkUnderTest], name: str, scenario: Callable[[SinkUnderTest], None]
) -> None:
    scenario(new_sink(name))


@pytest.mark.parametrize("name", [name for name in SINKS if name not in ALIKE])
def test_rows_that_are_left_out_are_reported(
    new_sink: Callable[[str], SinkUnderTest], name: str, caplog: pytest.LogCaptureFixture
) -> None:
    sink = new_sink(name)

    sink.store(rows(0, 1, 2))
    sink.store(rows(1, 2, 3, 4), 5, "second", checkpoint="new")

    (line,) = (line for line in caplog.messages if "left out" in line)
    assert line.startswith("batch 5: 2 of 4 rows for ")
    assert "orders:0" in line
