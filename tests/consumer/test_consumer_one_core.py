"""The option `one_core`: all worker threads of a process on one core."""

from __future__ import annotations

import errno
import os
import threading

import pytest

from penstock.consumer import handler
from penstock.consumer.execution import one_core
from penstock.message import Message
from penstock.options import PROCESS_VARIABLE
from penstock.testing import TestBroker
from support.consumers import consumer_of
from waiting import wait_until

pytestmark = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="only Linux lets a thread choose its core")


@pytest.fixture
def broker() -> TestBroker:
    made = TestBroker()
    made.create_topic("t", 1)
    for number in range(4):
        made.produce("t", b"x", key=b"%d" % number)
    return made


def test_all_workers_run_on_one_core_and_the_poll_thread_does_not(broker: TestBroker) -> None:
    allowed, together = os.sched_getaffinity(0), threading.Barrier(4)
    workers: dict[str, set[int]] = {}
    others: list[set[int]] = []

    def notes(_message: Message) -> None:
        workers[threading.current_thread().name] = os.sched_getaffinity(0)
        together.wait()  # all four workers are in here at once

    def key_of(message: Message) -> bytes | None:
        others.append(os.sched_getaffinity(0))
        return message.key

    with consumer_of(broker, {"t": handler(notes, key=key_of)}, workers=4, one_core=True) as consumer:
        wait_until(lambda: consumer.statistics().handled == 4)
        # It does not end before the consumer does.
        poll_thread = next(thread for thread in threading.enumerate() if thread.name == "penstock-poll-group-t")
        others.append(os.sched_getaffinity(poll_thread.native_id or 0))

    assert list(workers.values()) == [{max(allowed)}] * 4
    # The poll thread, and that which asks for keys.
    assert others == [allowed] * 5


def test_each_process_of_a_run_has_a_core_of_its_own_as_far_as_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {2, 3, 5})
    chosen = []
    for number in ("1", "2", "3", "4"):
        monkeypatch.setenv(PROCESS_VARIABLE, number)
        chosen.append(one_core.core_for_workers())

    assert chosen == [5, 3, 2, 5]


def test_where_a_core_cannot_be_chosen_messages_are_handled_all_the_same_and_it_is_logged(
    broker: TestBroker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuses(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "sched_setaffinity", refuses)
    with consumer_of(broker, {"t": handler(lambda _: None)}, workers=2, one_core=True) as consumer:
        wait_until(lambda: consumer.statistics().handled == 4)
    monkeypatch.delattr(os, "sched_setaffinity")

    assert "one_core has no effect on a worker" in caplog.text
    assert "Operation not permitted" in caplog.text
    assert one_core.core_for_workers() is None
    assert "this system does not let a thread choose its core" in caplog.text
