from __future__ import annotations

import runpy
from collections.abc import Callable
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from penstock.devbroker import DevBroker

EXAMPLE = Path(__file__).parents[2] / "examples" / "spark_totals.py"


def test_the_example_keeps_totals_that_a_lost_checkpoint_does_not_change(
    spark: SparkSession,
    broker: DevBroker,
    new_topic: Callable[..., str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    runpy.run_path(str(EXAMPLE))["main"](broker.bootstrap_servers, new_topic(partitions=2), tmp_path)

    printed = capsys.readouterr().out.splitlines()
    totals = ["N14228 3 13 5", "N24211 1 20 20", "N619AA 1 33 33"]
    assert printed == [f"first {row}" for row in totals] + [f"second {row}" for row in totals]
