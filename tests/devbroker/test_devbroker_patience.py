"""A starting process is waited for as long as the machine needs, and no longer."""

from __future__ import annotations

import pytest

from penstock.devbroker.patience import Patience, load_per_cpu


@pytest.mark.parametrize(("loads", "given_up_after"), [([0.1], 61), ([4.0], 241), ([4.0, 0.5], 241), ([0.5, 2.0], 121)])
def test_a_start_has_its_time_as_often_as_processes_wanted_each_cpu(
    loads: list[float], given_up_after: int, caplog: pytest.LogCaptureFixture
) -> None:
    now = 0.0
    patience = Patience("the broker", 60, clock=lambda: now, load=lambda: loads[min(int(now) // 30, len(loads) - 1)])

    while not patience.is_over():
        now += 1

    assert now == given_up_after
    assert caplog.messages[0].startswith("the broker is still starting after 20 s, of ")


def test_the_system_tells_its_load() -> None:
    assert load_per_cpu() >= 0
