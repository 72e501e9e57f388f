"""The file store beyond the suite of all stores: its lock, readers, disk and arguments."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from conformance.store_cases import FileBench, decide, prepare, settled
from file_stores import COMMIT, NOWHERE, ROLLBACK, forget_halves, half, halves_of, pending_in, store_of
from transaction_tools import line_of

from penstock.errors import (
    ConfigurationError,
    HalfNotStoredError,
    StoppedError,
    StoreFailedError,
    StoreInUseError,
    TopicNotFoundError,
)
from penstock.transactions.stores.file.administration import read_pending
from penstock.transactions.stores.file.checks import GroupChecks
from penstock.transactions.stores.file.log.folder import Folder
from penstock.transactions.stores.file.log.redo import SUFFIX
from penstock.transactions.stores.file.store import FileStore
from waiting import wait_until


def test_a_second_process_is_refused_and_the_error_names_who_has_the_store(tmp_path: Path) -> None:
    script = (
        "import sys; from penstock.transactions.stores.file.store import FileStore\n"
        f"FileStore(sys.argv[1], bootstrap_servers={NOWHERE!r}).start(); print('open', flush=True); sys.stdin.read()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert line_of(holder) == "open"

        with pytest.raises(StoreInUseError, match=rf"process {holder.pid}\b"):
            store_of(tmp_path).start()
    finally:
        holder.kill()
        holder.communicate(timeout=30)
    # The lock of a process that was killed is gone with it.
    with store_of(tmp_path), pytest.raises(StoreInUseError, match=rf"process {os.getpid()}\b"):
        store_of(tmp_path).start()


def test_a_look_at_what_is_pending_reads_no_file_while_others_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with store_of(tmp_path) as store:
        ids = [prepare(store, [half()]).halves[0].transaction_id for _ in range(3)]
        locked: list[bool] = []
        read = Folder.read

        def reading(self: Folder, *place: Any) -> bytes:
            locked.append(store.opened.lock.locked())
            return read(self, *place)

        # As those are that came before this process, or are delayed.
        for stored in pending_in(store):
            store.opened.unload_if_idle(stored)
        monkeypatch.setattr(Folder, "read", reading)

        pending = store.administration().pending()

    assert [transaction.transaction_id for transaction in pending] == ids
    assert locked == [False] * 3


def test_the_disk_it_takes_follows_what_is_pending(tmp_path: Path) -> None:
    with store_of(tmp_path) as store:
        old = prepare(store, [half(b"old" * 100)])
        for _ in range(400):
            decide(store, prepare(store, [half(b"x" * 200)]), ROLLBACK)
        segments = list(tmp_path.glob(f"*{SUFFIX}"))

        # 80 kB went through; the old one was carried along.
        assert len(segments) <= 4
        forget_halves(store)
        (stored,) = pending_in(store)
        assert halves_of(store, stored) == list(old.halves)
        # Another process finds the halves at their new place.
        assert [transaction.transaction_id for transaction in read_pending(tmp_path)] == [old.halves[0].transaction_id]

    with store_of(tmp_path) as again:
        assert [halves_of(again, stored) for stored in pending_in(again)] == [list(old.halves)]


def test_wrong_arguments_and_wrong_times_are_refused_in_penstocks_own_errors(bench: FileBench, tmp_path: Path) -> None:
    for options in ({"segment_bytes": 100}, {"segment_bytes": 1.5}, {"prefix": "no topic!"}, {"send_timeout": 0}):
        with pytest.raises(ConfigurationError):
            FileStore(tmp_path, **{"bootstrap_servers": NOWHERE, **options})  # type: ignore[arg-type] # wrong on purpose
    with pytest.raises(ConfigurationError):
        FileStore(tmp_path, bootstrap_servers=" ")
    idle = store_of(tmp_path / "idle")
    with pytest.raises(HalfNotStoredError, match="not started"):
        prepare(idle, [half()])
    with pytest.raises(StoppedError, match="not started"):
        idle.checks("orders")
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreFailedError, match="cannot be opened"):
        store_of(tmp_path / "file").start()
    lockless = mock.patch("fcntl.flock", side_effect=OSError(errno.ENOLCK, "No locks available"))
    with lockless, pytest.raises(StoreFailedError, match="No locks available"):
        store_of(tmp_path / "network").start()
    for topic in (bench.discarded, f"{bench.prefix}.file.x.done", "__consumer_offsets"):
        with pytest.raises(ConfigurationError, match="belongs to the store"):
            bench.store.require_target(topic, None)
    with pytest.raises(TopicNotFoundError):
        bench.store.require_target(f"{bench.topic}-absent", None)
    with pytest.raises(ConfigurationError, match="partitions 0 to 0"):
        bench.store.require_target(bench.topic, 1)
    bench.coordinator()
    with pytest.raises(ConfigurationError, match="has a coordinator already"):
        bench.make_coordinator().start()


def test_a_check_of_what_was_settled_meanwhile_is_not_asked_and_reads_nothing(
    bench: FileBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    settled_meanwhile: list[str] = []
    ask = GroupChecks.offer

    def settle_first(self: GroupChecks, some: Mapping[str, int]) -> bool:
        # Between the timer and the reading of the half: it is rolled back, and the segment that had it is removed.
        if not settled_meanwhile:
            settled_meanwhile.append(first.halves[0].transaction_id)
            bench.decide(first, ROLLBACK)
            for _ in range(60):
                decide(bench.store, prepare(bench.store, [bench.half(b"x" * 3_000)]), ROLLBACK)
        return ask(self, some)

    bench.segment_bytes = 4_096
    first = bench.prepare(bench.half(b"first"))
    opened = bench.file_store.opened
    place = opened.table.row(pending_in(bench.file_store)[0].offset).place
    monkeypatch.setattr(GroupChecks, "offer", settle_first)
    asked: list[Any] = []
    with bench.answering(lambda request: asked.append(request) or COMMIT):  # type: ignore[func-returns-value] # it is None
        coordinator = bench.coordinator(transaction_timeout=0.2)
        wait_until(lambda: settled_meanwhile)
        bench.send(COMMIT, bench.half(b"second"))
        settled(coordinator, committed=1)

    assert opened.redo.bases[0] > place
    assert first.halves[0].transaction_id not in {one.half.transaction_id for one in asked}
    assert bench.seen() == [b"second"]
