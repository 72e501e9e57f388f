"""Threads that can be abandoned in a call: the owner goes on in time, and they close their clients themselves."""

from __future__ import annotations

import threading

import pytest

from penstock.clients import reading as partition_reader
from penstock.clients.bounded_calls import (
    Disposable,
    LeftBehind,
    NotAnsweredError,
    TooManyLeftBehindError,
    end_within,
)
from penstock.clients.reading import PartitionReader
from waiting import wait_until


def test_a_call_returns_what_it_returned_and_raises_what_it_raised() -> None:
    thread = Disposable("test", LeftBehind("a test"))
    failing, adding = thread.start("a look", lambda: {}["nothing"]), thread.start("a sum", lambda: 1 + 1)

    for call in (failing, adding):
        wait_until(lambda call=call: thread.has_returned(call, 60, lambda: None))  # type: ignore[misc] # it is typed

    with pytest.raises(KeyError):
        failing.result()
    assert adding.result() == 2
    thread.close()


@pytest.mark.parametrize(("limit_s", "is_stuck"), [(0.05, False), (60.0, True)])
def test_a_call_past_its_limit_or_stuck_is_left_behind_and_cleaned_up_by_its_own_thread_when_it_returns(
    limit_s: float, is_stuck: bool
) -> None:
    left, gate, cleaned = LeftBehind("a test"), threading.Event(), list[str]()
    thread = Disposable("hanging", left)
    call = thread.start("the call", gate.wait)

    with pytest.raises(NotAnsweredError, match="the call did not return in"):
        wait_until(
            lambda: thread.has_returned(
                call, limit_s, lambda: cleaned.append(threading.current_thread().name), lambda: is_stuck
            )
        )

    assert (left.hanging, cleaned) == (1, [])
    gate.set()
    wait_until(lambda: left.hanging == 0)
    assert cleaned == ["hanging"]


def test_what_was_started_behind_a_hanging_call_is_not_made_once_it_was_left_behind() -> None:
    left, gate, made = LeftBehind("a test"), threading.Event(), list[int]()
    thread = Disposable("hanging", left)
    thread.start("the first", gate.wait)
    thread.start("the second", lambda: made.append(1))

    thread.abandon(lambda: None)
    gate.set()
    wait_until(lambda: left.hanging == 0)

    assert made == []


def test_a_cleanup_that_raises_ends_nothing() -> None:
    left, gate = LeftBehind("a test"), threading.Event()
    thread = Disposable("hanging", left)
    thread.start("the call", gate.wait)

    thread.abandon(lambda: 1 // 0)
    gate.set()

    wait_until(lambda: left.hanging == 0)


def test_too_many_that_hang_are_reported_in_a_sentence() -> None:
    left, gate, hanging = LeftBehind("the store", most=1), threading.Event(), threading.Semaphore(0)

    def hang() -> None:
        hanging.release()
        gate.wait()

    for number in range(2):
        left.require_few()
        thread = Disposable(f"hanging-{number}", left)
        thread.start("the call", hang)
        assert hanging.acquire(timeout=10)
        thread.abandon(lambda: None)

    with pytest.raises(TooManyLeftBehindError, match="2 calls of the store hang"):
        left.require_few()
    gate.set()
    wait_until(lambda: left.hanging == 0)


def test_closing_that_hangs_is_left_behind_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    gate = threading.Event()

    assert end_within(5, "closing at once", lambda: 7) == 7
    assert end_within(0.05, "closing a reader", gate.wait) is None

    assert [record.getMessage() for record in caplog.records] == [
        "closing a reader did not return in 0.05 s: it was abandoned, and ends with the process at the latest"
    ]
    gate.set()


def test_a_reader_whose_client_does_not_close_is_left_behind(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(partition_reader, "CLOSE_S", 0.05)
    gate = threading.Event()

    class Client:
        def close(self) -> None:
            gate.wait()

    with PartitionReader("127.0.0.1:1", {"log_level": 0}, "readers") as reader:
        reader.consumer = Client()  # type: ignore[assignment] # what is used of it

    assert "closing the reader of readers did not return" in caplog.text
    gate.set()
