from __future__ import annotations

import signal

import pytest

from penstock.options import PROCESS_VARIABLE
from penstock.supervisor.stopping import StopRequests

TERM, INT = signal.SIGTERM, signal.SIGINT


@pytest.mark.parametrize(
    ("heard", "count"),
    [
        ([(TERM, 100.0)], 1),
        ([(TERM, 100.0), (TERM, 100.01)], 1),  # `timeout` signals its child and then the child's group
        ([(TERM, 100.0), (TERM, 100.1)], 2),
        ([(INT, 100.0), (INT, 100.1)], 2),
        ([(TERM, 100.0), (INT, 100.0)], 2),
        ([(TERM, 100.0), (TERM, 100.1), (TERM, 100.2)], 3),
    ],
)
def test_the_same_signal_twice_at_once_is_one_request(heard: list[tuple[int, float]], count: int) -> None:
    requests = StopRequests()

    added = [requests.add(number, now) for number, now in heard]

    assert requests.count == count
    assert added.count(True) == count


def test_a_member_waits_longer_for_the_same_signal_from_a_busy_supervisor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PROCESS_VARIABLE, "1")
    requests = StopRequests()

    assert [requests.add(TERM, now) for now in (100.0, 100.2)] == [True, False]
    assert requests.add(INT, 100.21)
