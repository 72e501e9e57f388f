"""The option `one_core`: all worker threads of a process on one core."""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Callable

import pytest
from consuming import consumer_of

from kafka_tools import produce
from penstock.consumer import handler
from penstock.consumer.execution import one_core
from penstock.devbroker import DevBroker
from penstock.message import Message
from penstock.options import PROCESS_VARIABLE
from waiting import wait_until

NewTopic = Callable[..., str]

pytestmark = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="only Linux lets a thread choose its core")


def test_all_workers_run_on_one_core_and_no_other_thread_does(broker: DevBroker, new_topic: NewTopic) -> None:
    topic, allowed = new_topic(), os.sched_getaffinity(0)
    together = threading.Barrier(4)
    seen: dict[str, set[int]] = {}

    def notes(_message: Message) -> None:
        together.wait(60)  # all four workers are in here at once
        seen[threading.current_thread().name] = os.sched_getaffinity(0)

    with consumer_of(broker, {topic: handler(notes, order="none")}, workers=4, one_core=True) as consumer:
        produce(broker.bootstrap_servers, topic, [(b"%d" % i, b"") for i in range(4)])
        wait_until(lambda: consumer.statistics().handled == 4)
        threads = {one.name: one.native_id for one in threading.enumerate()}
        others = {name: os.sched_getaffinity(native) for name, native in threads.items() if native and name not in seen}

    assert list(seen.values()) == [{max(allowed)}] * 4
    assert any(name.startswith("penstock-poll-") for name in others)
    assert set(map(frozenset, others.values())) == {frozenset(allowed)}


def test_each_process_of_a_run_has_a_core_of_its_own_as_far_as_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {2, 3, 5})
    chosen = []
    for number in ("1", "2", "3", "4"):
        monkeypatch.setenv(PROCESS_VARIABLE, number)
        chosen.append(one_core.core_for_workers())

    assert chosen == [5, 3, 2, 5]


def test_where_a_core_cannot_be_chosen_messages_are_handled_all_the_same_and_it_is_logged(
    broker: DevBroker, new_topic: NewTopic, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuses(*_: object) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "sched_setaffinity", refuses)
    topic = new_topic()
    with (
        caplog.at_level(logging.WARNING, logger=one_core.__name__),
        consumer_of(broker, {topic: handler(lambda _: None)}, workers=2, one_core=True) as consumer,
    ):
        produce(broker.bootstrap_servers, topic, [(b"k", b"v")])
        wait_until(lambda: consumer.statistics().handled == 1)

    assert "one_core has no effect on a worker" in caplog.text
    assert "Operation not permitted" in caplog.text


def test_a_system_on_which_threads_cannot_choose_says_so(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delattr(os, "sched_setaffinity")

    assert one_core.core_for_workers() is None
    assert "this system does not let a thread choose its core" in caplog.text
