"""Waiting with an eye on what stands still, takes too long or has died."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.demo import stage as stage_module
from penstock.demo.checks.fold import FlightFold
from penstock.demo.children import Child, DemoError
from penstock.demo.display import Counts
from penstock.demo.senders.plan import Plan
from penstock.demo.stage import Stage, Workplace
from waiting import wait_until


class Shown:
    def __init__(self) -> None:
        self.counts: list[Counts] = []

    def show(self, counts: Counts) -> None:
        self.counts.append(counts)


def a_stage(folder: Path, limit_s: float = 100.0) -> tuple[Stage, Shown]:
    shown = Shown()
    place = Workplace("127.0.0.1:1", folder)
    return Stage(place, Plan(poison=1, killed=2), FlightFold(1), shown, limit_s=limit_s, spark=False), shown


def test_a_condition_that_holds_is_shown_and_waited_for_no_longer(tmp_path: Path) -> None:
    stage, shown = a_stage(tmp_path)

    stage.until(lambda counts: counts.sent == 0, "nothing is sent")

    assert shown.counts == [Counts()]


def test_what_stands_still_is_told_with_what_is_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stage, _ = a_stage(tmp_path)
    monkeypatch.setattr(stage_module, "STALLED_S", 0.2)

    with pytest.raises(
        DemoError, match=r"nothing has moved for 0.2 s while waiting until pigs fly(.|\n)*Coordinator: "
    ):
        stage.until(lambda _: False, "pigs fly")


def test_what_takes_too_long_is_told(tmp_path: Path) -> None:
    stage, _ = a_stage(tmp_path, limit_s=0.2)

    with pytest.raises(DemoError, match=r"still waiting until pigs fly(.|\n)*Senders: "):
        stage.until(lambda _: False, "pigs fly")


def test_a_child_that_died_ends_the_waiting(tmp_path: Path) -> None:
    stage, _ = a_stage(tmp_path)
    with Child("the airline's sender 0", ["penstock.no_such_module"], tmp_path / "log") as child:
        stage.senders[0] = child
        wait_until(lambda: child.exit_code() is not None)

        with pytest.raises(DemoError, match=r"sender 0 ended with code 1(.|\n)*no_such_module"):
            stage.until(lambda _: False, "pigs fly")
