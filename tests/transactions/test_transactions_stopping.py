"""A stop has a time limit: a hanging call of the client library is abandoned, and the log says so."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import NoReturn
from unittest.mock import Mock

import pytest

from penstock.devbroker import DevBroker
from penstock.errors import PenstockError, StoppedError
from penstock.transactions import Coordinator, SqlStore, TransactionalProducer, acked_producer
from penstock.transactions.acked_producer import AckedProducer
from penstock.transactions.stores.kafka import done_watch
from penstock.transactions.stores.kafka.coordinator.membership import Membership
from penstock.transactions.stores.kafka.done_watch import DoneWatch
from penstock.transactions.wire.topics import StoreTopics
from waiting import wait_until

Startable = Coordinator | TransactionalProducer


def sql_coordinator(servers: str, folder: Path) -> Coordinator:
    return Coordinator(store=SqlStore(f"sqlite:///{folder}/tx.db", bootstrap_servers=servers))


@pytest.mark.parametrize(
    "make",
    [
        lambda servers, _folder: Coordinator(bootstrap_servers=servers),
        lambda servers, _folder: TransactionalProducer("shop", bootstrap_servers=servers),
        sql_coordinator,
    ],
    ids=["coordinator", "producer", "sql"],
)
def test_a_stop_does_not_wait_for_a_start_that_gets_no_answer(
    make: Callable[[str, Path], Startable], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as silent:
        one = make(f"127.0.0.1:{silent.getsockname()[1]}", tmp_path)

        def start() -> None:
            with suppress(PenstockError):
                one.start()

        starting = threading.Thread(target=start, daemon=True)
        starting.start()
        refused = False
        # Not closed before: the start may end early where its connection was.
        with closing(silent.accept()[0]):
            try:
                one.stop(0.1)
            except StoppedError:
                refused = True

            assert starting.is_alive()
        assert refused or "its start has not returned" in caplog.text


def test_a_coordinator_whose_thread_does_not_start_joins_no_group(
    broker: DevBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    join, start = Mock(), threading.Thread.start
    monkeypatch.setattr(Membership, "join", join)

    def refuse(thread: threading.Thread) -> None:
        if thread.name.startswith("penstock-coordinator-"):
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)

    coordinator = Coordinator(bootstrap_servers=broker.bootstrap_servers, prefix="unstarted")
    for _ in range(2):
        with pytest.raises(RuntimeError, match="start new thread"):
            coordinator.start()

    # As a member it would keep its partitions from others, and no thread would serve them.
    join.assert_not_called()
    coordinator.stop()


def test_a_delivery_report_that_hangs_holds_no_stop(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(acked_producer, "CLOSE_S", 0.1)
    monkeypatch.setattr(acked_producer, "_PURGE_S", 0.1)
    reached, gate = threading.Event(), threading.Event()

    def hangs(*_: object) -> None:
        reached.set()
        gate.wait()

    sends = AckedProducer("127.0.0.1:1", {"log_level": 0}, 0.1, "shop")
    sends.start()
    sends.post("t", 0, b"k", b"v", headers=None, report=hangs)
    assert reached.wait(60)

    sends.stop(0.1)

    assert "the last sends of shop did not return in 0.3 s: it was abandoned" in caplog.text
    gate.set()
    wait_until(lambda: not any("last-sends" in thread.name for thread in threading.enumerate()))
    assert not sends.delivering, "a later thread may get the same id, and must not wait for its reports"


def test_a_watch_of_publications_whose_client_hangs_holds_no_stop(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(done_watch, "CLOSE_S", 0.1)
    gate = threading.Event()
    watch = DoneWatch("127.0.0.1:1", {}, StoreTopics("store"), "shop", lambda: 0)
    watch._thread = threading.Thread(target=gate.wait, name="the watch", daemon=True)
    watch._thread.start()

    watch.stop()

    assert "the watch is abandoned" in caplog.text
    gate.set()


def test_a_watch_of_publications_that_cannot_begin_says_why_and_begins_again_when_it_is_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun: list[str] = []

    def fail(*_: object, **_options: object) -> NoReturn:
        begun.append("")
        raise OSError("too many open files")

    monkeypatch.setattr(done_watch, "PartitionReader", fail)
    watch = DoneWatch("127.0.0.1:1", {}, StoreTopics("store"), "shop", lambda: 0)

    for _ in range(2):
        with pytest.raises(OSError, match="too many open files"):
            watch.add("an id", lambda _: None)

    assert len(begun) == 2
    watch.stop()
