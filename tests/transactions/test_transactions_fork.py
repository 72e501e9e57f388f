"""A producer in a process that was forked from its own: refused with a sentence, where it would hang for ever."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from conformance.store_cases import bench_of

from penstock.devbroker import DevBroker
from penstock.errors import PenstockError
from penstock.transactions import FileStore, TransactionalProducer
from waiting import wait_until


@pytest.mark.parametrize("kind", ["kafka", "sqlite"])
def test_a_send_after_a_fork_is_refused_and_the_parent_goes_on(
    kind: str, broker: DevBroker, new_topic: Callable[..., str], tmp_path: Path
) -> None:
    topic, said = new_topic(), tmp_path / "said"
    store = bench_of(kind, broker.bootstrap_servers, topic, tmp_path).make_store()
    with TransactionalProducer("orders", store=store) as producer:
        producer.send(topic, value=b"before")
        child = os.fork()
        if child == 0:
            # No test runs on here, and nothing of the parent's is closed.
            try:
                producer.send(topic, value=b"in the child")
            except PenstockError as error:
                said.write_text(str(error))
            finally:
                os._exit(0)
        try:
            wait_until(lambda: os.waitpid(child, os.WNOHANG)[0], 30)
        except AssertionError:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            raise

        assert f"process {os.getpid()}" in said.read_text()
        assert "forked" in said.read_text()
        producer.send(topic, value=b"after")
    assert sys.exc_info() == (None, None, None)


def test_a_forked_child_does_not_keep_the_lock_of_a_file_store(tmp_path: Path) -> None:
    store = FileStore(tmp_path / "store", bootstrap_servers="127.0.0.1:9")
    store.start()
    child = os.fork()
    if child == 0:
        # It lives on, as a worker that was forked does.
        signal.pause()
        os._exit(0)
    try:
        store.stop(30)

        with FileStore(tmp_path / "store", bootstrap_servers="127.0.0.1:9") as again:
            assert again.opened
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
