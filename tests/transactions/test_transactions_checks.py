"""The threads that run a user's checks: their slots, their time limit, and the cost of a hung call."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from asyncio import CancelledError
from collections.abc import Iterator

import pytest

from penstock.transactions.bulkhead import BulkheadPool
from waiting import wait_until


@pytest.fixture
def slots() -> Iterator[BulkheadPool]:
    made = BulkheadPool(1, 0.2, "penstock-test")
    yield made
    made.close(0)


def waits(for_what: threading.Event, began: threading.Event | None = None) -> None:
    if began is not None:
        began.set()
    for_what.wait()


def tended(slots: BulkheadPool) -> BulkheadPool:
    slots.tend()
    return slots


def test_a_hung_call_costs_its_slot_until_the_limit_and_then_nothing(
    slots: BulkheadPool, caplog: pytest.LogCaptureFixture
) -> None:
    let_go, ran = threading.Event(), threading.Event()
    late: list[str] = []

    def hang() -> None:
        let_go.wait()
        late.append("returned")

    slots.submit("the hanging one", hang)
    slots.submit("the next", ran.set)

    with caplog.at_level(logging.ERROR, "penstock.transactions"):
        wait_until(lambda: tended(slots).hung and ran.is_set(), 20)

    assert slots.hung == 1
    assert "the hanging one" in caplog.text
    assert "let_go.wait" in caplog.text
    assert late == []
    let_go.set()
    wait_until(lambda: late == ["returned"], 20)


def test_hung_calls_are_replaced_up_to_their_limit(slots: BulkheadPool, caplog: pytest.LogCaptureFixture) -> None:
    let_go, ran = threading.Event(), threading.Event()
    for n in range(3):
        slots.submit(f"hanging {n}", lambda: waits(let_go))
    slots.submit("the last", ran.set)

    wait_until(lambda: tended(slots).hung == 3, 20)
    slots.tend()

    assert not ran.wait(0.3)
    assert "restart the process" in caplog.text
    let_go.set()
    assert ran.wait(20), "a returning check takes the free slot"


@pytest.mark.parametrize("error", [ValueError("on purpose"), SystemExit(1), CancelledError()], ids=type)
def test_a_call_that_raises_ends_no_slot(
    slots: BulkheadPool, error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    ran = threading.Event()

    def raises() -> None:
        raise error

    for n in range(5):
        slots.submit(f"raising {n}", raises)
    slots.submit("the next", ran.set)

    assert ran.wait(20)
    assert f"raising 4 failed with {type(error).__name__}" in caplog.text
    assert not slots.is_short


def test_closing_drops_what_waits_and_leaves_a_hung_call_behind() -> None:
    slots, let_go, began, ran = (
        BulkheadPool(1, 60, "penstock-test"),
        threading.Event(),
        threading.Event(),
        threading.Event(),
    )
    slots.submit("hanging", lambda: waits(let_go, began))
    assert began.wait(20)
    slots.submit("waiting", ran.set)

    assert not slots.close(0.1)
    let_go.set()
    assert slots.close(20)
    assert not ran.is_set()


def test_a_hung_call_does_not_keep_the_process_from_ending() -> None:
    program = (
        "import threading\n"
        "from penstock.transactions.bulkhead import BulkheadPool\n"
        "began, slots = threading.Event(), BulkheadPool(1, 60, 'x')\n"
        "slots.submit('hanging', lambda: began.set() or threading.Event().wait())\n"
        "assert began.wait(20)\n"
        "slots.close(0.1)\n"
        "print('at the end')\n"
    )

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)

    assert done.stdout == "at the end\n"
