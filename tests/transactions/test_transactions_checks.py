"""Checks in a producer's process: their slots, their time limit, and what a hung one costs."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
from asyncio import CancelledError
from collections.abc import Iterator, Sequence

import pytest

from penstock.transactions.bulkhead import BulkheadPool
from penstock.transactions.model import HalfMessage, TransactionState
from penstock.transactions.producer.check_responder import CheckResponder
from penstock.transactions.wire.check_request import CheckRequest
from penstock.transactions.wire.half import Half
from penstock.transactions.wire.ids import new_id
from penstock.transactions.wire.ops import Author, Verdict
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


def test_so_many_hung_calls_are_replaced_and_no_more(slots: BulkheadPool, caplog: pytest.LogCaptureFixture) -> None:
    let_go, ran = threading.Event(), threading.Event()
    for n in range(3):
        slots.submit(f"hanging {n}", lambda: waits(let_go))
    slots.submit("the last", ran.set)

    wait_until(lambda: tended(slots).hung == 3, 20)
    slots.tend()

    assert not ran.wait(0.3)
    assert "restart the process" in caplog.text
    let_go.set()
    assert ran.wait(20), "who returns takes the place that nobody was given"


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


def request(check_number: int = 1) -> CheckRequest:
    half = Half(new_id(), "orders", "topic", None, None, b"v", (), None)
    return CheckRequest(half, 0, 0, check_number)


class Source:
    """Questions as a test gives them; a test may also let the taking of them fail."""

    def __init__(self) -> None:
        self.requests: list[CheckRequest] = []
        self.failures: list[Exception] = []
        self.failed = 0

    def take(self, timeout_s: float) -> Sequence[CheckRequest]:
        if self.failures:
            self.failed += 1
            raise self.failures.pop()
        threading.Event().wait(min(timeout_s, 0.01))
        taken, self.requests = self.requests, []
        return taken

    def close(self) -> None:
        pass


class Answers:
    """A store that takes answers and has questions."""

    def __init__(self) -> None:
        self.source = Source()
        self.answered: list[tuple[str, Verdict]] = []

    def checks(self, group: str) -> Source:
        assert group == "orders"
        return self.source

    def answer(self, of: CheckRequest, verdict: Verdict, author: Author) -> None:
        assert author is Author.CHECK
        self.answered.append((of.half.transaction_id, verdict))


def test_one_hung_check_does_not_delay_the_others_and_its_late_answer_counts() -> None:
    store, hanging, let_go = Answers(), request(), threading.Event()
    others = [request() for _ in range(20)]

    def check(half: HalfMessage) -> TransactionState:
        if half.transaction_id == hanging.half.transaction_id:
            let_go.wait()
        return TransactionState.COMMIT

    checker = CheckResponder(store, "orders", check, 1, timeout_s=1.0)  # type: ignore[arg-type] # what is used of it
    store.source.requests = [hanging, *others, hanging]
    checker.start()

    wait_until(lambda: len(store.answered) == 20, 20)
    assert checker.hung == 1
    assert {name for name, _ in store.answered} == {one.half.transaction_id for one in others}
    let_go.set()
    wait_until(lambda: len(store.answered) == 21, 20)
    assert store.answered[-1] == (hanging.half.transaction_id, Verdict.COMMIT)
    checker.stop(20)


@pytest.mark.parametrize("error", [RuntimeError("no database"), SystemExit(1), CancelledError()], ids=type)
def test_a_check_that_raises_whatever_it_is_has_said_unknown_and_the_next_is_answered(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    store, raising, innocent = Answers(), [request() for _ in range(6)], request()

    def check(half: HalfMessage) -> TransactionState:
        if half.transaction_id != innocent.half.transaction_id:
            raise error
        return TransactionState.COMMIT

    checker = CheckResponder(store, "orders", check, 1)  # type: ignore[arg-type] # what is used of it
    checker.start()
    store.source.requests = [*raising, innocent]

    wait_until(lambda: len(store.answered) == 7, 20)
    assert store.answered == [
        *((one.half.transaction_id, Verdict.UNKNOWN) for one in raising),
        (innocent.half.transaction_id, Verdict.COMMIT),
    ]
    assert (checker.failed, checker.hung) == (6, 0)
    told = f"check 1 of transaction {raising[0].half.transaction_id} raised {type(error).__name__}"
    assert told in caplog.text
    checker.stop(20)


def test_a_check_that_hangs_does_not_keep_the_producer_from_stopping() -> None:
    store, began, others = Answers(), threading.Event(), set(threading.enumerate())

    def check(half: HalfMessage) -> TransactionState:
        began.set()
        threading.Event().wait(120)
        return TransactionState.UNKNOWN

    checker = CheckResponder(store, "orders", check, 1)  # type: ignore[arg-type] # what is used of it
    store.source.requests = [request()]
    checker.start()
    assert began.wait(20)

    checker.stop(1.0)

    new = lambda: {t.name for t in set(threading.enumerate()) - others}  # noqa: E731 - asked again and again
    wait_until(lambda: not any(name.startswith("penstock-checks-") for name in new()), 60)


def test_a_source_that_fails_in_any_way_is_asked_again() -> None:
    store, asked = Answers(), request()
    store.source.failures = [ValueError("nonsense")]
    store.source.requests = [asked]
    checker = CheckResponder(store, "orders", lambda _: TransactionState.ROLLBACK, 1)  # type: ignore[arg-type] # what is used of it

    checker.start()

    wait_until(lambda: store.answered == [(asked.half.transaction_id, Verdict.ROLLBACK)], 20)
    assert store.source.failed == 1
    checker.stop(20)
