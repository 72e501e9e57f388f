"""The file store where something fails: killed processes, ends in doubt, disks."""

from __future__ import annotations

import gc
import os
import shutil
import threading
import time
from collections import Counter
from pathlib import Path
from queue import SimpleQueue
from unittest import mock

import pytest
from conformance.store_cases import NO_CHECKS, FileBench, decide, prepare, settled
from file_stores import COMMIT, ROLLBACK, half, pending_in, store_of
from transaction_tools import child, kill, line_of

from kafka_tools import ends
from penstock.errors import (
    DecisionNotStoredError,
    HalfNotStoredError,
    StoreDamagedError,
)
from penstock.transactions.core.check_plan import CheckPolicy
from penstock.transactions.core.quarantine import TargetQuarantine
from penstock.transactions.stores.done_log import DoneRead
from penstock.transactions.stores.file.administration import read_pending
from penstock.transactions.stores.file.log import journal as journals
from penstock.transactions.stores.file.log.folder import Folder
from penstock.transactions.stores.file.log.journal import Journal
from penstock.transactions.stores.file.log.redo import SUFFIX, NoRoomError
from penstock.transactions.stores.file.shard import FileShard
from penstock.transactions.stores.file.store import FileStore
from penstock.transactions.stores.relayed_store import decision
from penstock.transactions.stores.shards import CheckTerms
from penstock.transactions.wire.ops import Author, Verdict
from waiting import wait_until


def shard_of(store: FileStore) -> FileShard:
    """Return the shard of a coordinator: its work is done when a test says so."""
    return store.open_shards(CheckTerms(CheckPolicy(600.0, 600.0, 1), session_s=600.0), lambda: None)


@pytest.mark.parametrize("rounds", [2, pytest.param(6, marks=pytest.mark.thorough)])
def test_a_process_that_is_killed_again_and_again_loses_and_doubles_nothing(bench: FileBench, rounds: int) -> None:
    acknowledged: set[int] = set()
    for round_number in range(rounds):
        first, published = round_number * 1_000_000, ends(bench.servers, bench.topic, 1)[0]
        with child(
            "file_store_child.py", bench.servers, str(bench.folder), bench.prefix, bench.topic, str(first)
        ) as process:
            # It dies while it stores, publishes and settles; each time a little later.
            for _ in range(60 + 70 * round_number):
                acknowledged.add(int(line_of(process)))
            # It had begun to publish, so that the next one begins where this was killed.
            wait_until(lambda before=published: ends(bench.servers, bench.topic, 1)[0] > before, 60)  # type: ignore[misc] # bound at once
            kill(process)
            assert process.stdout is not None
            acknowledged.update(int(line) for line in process.stdout.read().split("\n")[:-1])
    assert len(acknowledged) > rounds * 60

    coordinator = bench.coordinator(transaction_timeout=0.2)
    with bench.answering(lambda request: COMMIT if int(request.half.value or b"") % 3 else ROLLBACK):
        settled(coordinator)

    seen = Counter(int(value or b"") for value in bench.seen())
    assert [number for number, count in seen.items() if count > 1] == []
    assert [number for number in seen if number % 3 == 0] == []
    assert {number for number in acknowledged if number % 3} - set(seen) == set()


def test_a_disk_that_fails_ends_the_store_and_what_it_acknowledged_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored = half(b"stored")
    with store_of(tmp_path) as store:
        prepared = prepare(store, [stored])
        sync = Folder.sync

        def fail(self: Folder, name: str) -> None:
            raise OSError(5, "Input/output error")

        monkeypatch.setattr(Folder, "sync", fail)
        with pytest.raises(HalfNotStoredError, match="Input/output error"):
            prepare(store, [half(b"lost")])
        monkeypatch.setattr(Folder, "sync", sync)

        # After a sync that failed, nothing is asked of the disk again.
        with pytest.raises(DecisionNotStoredError, match="takes nothing more"):
            decide(store, prepared, COMMIT)
        with pytest.raises(HalfNotStoredError, match="open the store again"):
            prepare(store, [half()])

    with store_of(tmp_path) as again:
        assert stored.transaction_id in [one.transaction_id for one in pending_in(again)]


def test_a_full_disk_refuses_what_comes_and_goes_on_when_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with store_of(tmp_path) as store:
        prepared = prepare(store, [half(b"x" * 3_000)])

        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(os, "posix_fallocate", full)
            with pytest.raises(HalfNotStoredError, match="No space left"):
                prepare(store, [half(b"y" * 3_000)])
            # Records that need no new segment are stored.
            decide(store, prepared, ROLLBACK)
        stored = prepare(store, [half(b"y" * 3_000)])

        assert [one.transaction_id for one in read_pending(tmp_path)] == [stored.halves[0].transaction_id]


def test_a_process_without_descriptors_refuses_what_it_cannot_read_and_goes_on_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    due_ms = int(time.time() * 1000) + 30_000
    with store_of(tmp_path) as store:
        late = [prepare(store, [half(deliver_at_ms=due_ms)]) for _ in range(3)]
        for prepared in late:
            decide(store, prepared, COMMIT)
        first, second, published = (prepared.halves[0].transaction_id for prepared in late)
        shard = shard_of(store)
        withdrawn = store.opened.find(second)
        assert withdrawn is not None
        store.opened.queue.add(withdrawn)
        store.opened.near_ms = 5e12

        def none_left(*_: object) -> None:
            raise OSError(24, "Too many open files")

        with monkeypatch.context() as patch:
            patch.setattr(Folder, "read", none_left)
            shard.take_over(DoneRead(1, frozenset({published})), TargetQuarantine(), "d")
            with pytest.raises(store.transient_errors):
                shard.flush()
            assert not shard.is_durable(), "the done log is still needed"
            cancel = decision(second, "orders", ROLLBACK, Author.PRODUCER)
            both = [cancel, cancel._replace(transaction_id=first)]
            assert all("Too many open files" in str(result) for result in store.opened.write(both))
            assert second in store.opened.queue.delays, "its withdrawal was taken back"

        for transaction_id in (first, second):
            store.cancel(transaction_id, "orders", 1.0)
        shard.flush()
        wait_until(shard.is_durable)
        assert pending_in(store) == []


def test_a_coordinator_whose_process_has_no_descriptors_looks_now_and_then(
    bench: FileBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journals, "_PAYLOAD_BYTES", 0)
    coordinator = bench.coordinator(**NO_CHECKS)
    bench.send(COMMIT, bench.half(b"1"))
    settled(coordinator, committed=1)

    with monkeypatch.context() as patch:
        reading, rounds = mock.Mock(side_effect=OSError(24, "Too many open files")), mock.Mock(return_value=None)
        patch.setattr(Folder, "read", reading)
        bench.send(COMMIT, bench.half(b"2"))
        wait_until(lambda: reading.called)
        patch.setattr(FileShard, "renew", rounds)
        begun = reading.call_count
        wait_until(lambda: reading.call_count > begun + 1)
    assert rounds.call_count < 1_000

    settled(coordinator, committed=2)


def test_a_folder_that_is_moved_keeps_its_store_and_one_that_is_deleted_ends_it(tmp_path: Path) -> None:
    moved, path = tmp_path / "moved", tmp_path / "store"
    with store_of(path) as store:
        ids = [prepare(store, [half(bytes(1_500))]).halves[0].transaction_id]
        path.rename(moved)
        with store_of(path) as other:
            for _ in range(4):
                ids.append(prepare(store, [half(bytes(1_500))]).halves[0].transaction_id)
                prepare(other, [half(bytes(1_500))])
            shutil.rmtree(path)
            with pytest.raises(HalfNotStoredError, match=r"was deleted: '\d+.redo'; the local transaction did not run"):
                prepare(other, [half()])
        assert not path.exists()

    with store_of(moved) as store:
        assert [stored.transaction_id for stored in pending_in(store)] == ids


def test_a_read_that_comes_after_the_stop_leaves_no_descriptor_open(tmp_path: Path) -> None:
    with store_of(tmp_path) as store:
        prepare(store, [half()])
        opened = store.opened
    (number,) = (number for number, _ in opened.table)
    assert opened.load(number) is not None

    del opened, store
    gc.collect()
    descriptors = [link for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    assert str(tmp_path) not in [os.path.realpath(link) for link in descriptors]


def test_a_damaged_store_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    with store_of(tmp_path) as store:
        for _ in range(3):
            prepare(store, [half()])
    (segment,) = tmp_path.glob(f"*{SUFFIX}")
    content = bytearray(segment.read_bytes())
    content[150] ^= 1
    segment.write_bytes(content)

    with pytest.raises(StoreDamagedError, match=rf"{segment.name}.*restore its folder from a backup"):
        store_of(tmp_path).start()

    assert segment.read_bytes() == content
    # The lock was let go.
    with pytest.raises(StoreDamagedError):
        store_of(tmp_path).start()


def test_who_prepares_does_not_wait_for_a_slow_disk_however_much_waits_to_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_go, begun = threading.Event(), threading.Event()
    sync = Folder.sync

    def slow(self: Folder, name: str) -> None:
        begun.set()
        let_go.wait(120)
        sync(self, name)

    answers: SimpleQueue[object] = SimpleQueue()
    with FileStore(tmp_path, bootstrap_servers="127.0.0.1:9") as store:
        monkeypatch.setattr(Folder, "sync", slow)
        store.prepare([half()], answers.put)
        assert begun.wait(30)

        def prepare_much() -> None:
            for _ in range(70):
                store.prepare([half(bytes(1 << 20))], answers.put)

        # As an event loop would: it has no time to wait.
        preparing = threading.Thread(target=prepare_much, daemon=True)
        preparing.start()
        preparing.join(60)
        has_waited = preparing.is_alive()
        let_go.set()
        stored = [answers.get(timeout=60) for _ in range(71)]

    assert not has_waited
    assert not any(isinstance(one, Exception) for one in stored)


def test_what_memory_has_no_room_for_is_published_from_the_log(
    bench: FileBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journals, "_PAYLOAD_BYTES", 0)
    opened = bench.file_store.opened
    for number in range(3):
        bench.send(COMMIT, bench.half(b"%d" % number, key=b"k", order_key=b"k"))
    of_two = bench.half()
    bench.send(COMMIT, *(of_two._replace(value=b"part %d" % part, part=(part, 2)) for part in (1, 2)))
    bench.send(COMMIT, bench.half(b"late", deliver_at_ms=int(time.time() * 1000) + 200))
    with opened.lock:
        assert all(stored.half.value is None for stored in opened.live.values())

    settled(bench.coordinator(**NO_CHECKS), committed=5)

    seen = bench.seen()
    assert [value for value in seen if value in {b"0", b"1", b"2"}] == [b"0", b"1", b"2"]
    assert sorted(seen, key=str) == [b"0", b"1", b"2", b"late", b"part 1", b"part 2"]
    wait_until(lambda: not opened.live)
    assert opened._payload_bytes == 0


def test_what_a_former_coordinator_could_not_settle_for_lack_of_room_is_settled_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with store_of(tmp_path) as store:
        decide(store, prepare(store, [half()]), COMMIT)
        former = shard_of(store)
        former.take_over(DoneRead(0, frozenset()), TargetQuarantine(), "d")
        batch = former.next_batch(10, lambda _: None, 1_000)
        assert batch is not None

        def full(*_: object) -> None:
            raise NoRoomError("no room")

        with monkeypatch.context() as patch:
            patch.setattr(Journal, "_write", full)
            former.settled(batch, 1)
            former.close()
            shard = shard_of(store)
            with pytest.raises(HalfNotStoredError):
                prepare(store, [half()])
        assert not shard.is_durable()

        wait_until(shard.is_durable)
        assert pending_in(store) == []


def test_what_its_target_does_not_take_is_not_read_and_what_was_read_for_nothing_leaves_the_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journals, "_PAYLOAD_BYTES", 2_500)
    read: list[int] = []
    load = Journal.load

    def loads(self: Journal, number: int) -> object:
        read.append(number)
        return load(self, number)

    with store_of(tmp_path) as store:
        opened, shard = store.opened, shard_of(store)
        now_ms = int(time.time() * 1000)
        for deliver_at_ms in (None, None, None, None, now_ms, now_ms):
            decide(store, prepare(store, [half(bytes(1_000), key=b"k", deliver_at_ms=deliver_at_ms)]), COMMIT)
        monkeypatch.setattr(Journal, "load", loads)

        whole = shard.next_batch(10, lambda _: None, 1 << 20)
        assert whole is not None
        assert all(one.dropped is None for one in whole.decided)
        shard.failed(whole)
        assert opened._payload_bytes <= 2_500
        read.clear()
        assert shard.next_batch(10, lambda _: "t", 1 << 20) is None
        assert (len(shard.set_aside), read) == (6, [])

        tried = shard.trial(whole.decided, lambda _: True)
        assert tried is not None
        assert all(one.half.value == bytes(1_000) for one in tried.decided)
        shard.failed(tried)
        assert opened._payload_bytes <= 2_500


def test_a_hot_key_that_memory_has_no_room_for_goes_in_one_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journals, "_PAYLOAD_BYTES", 0)
    with store_of(tmp_path) as store:
        shard = shard_of(store)
        for number in range(3):
            decide(store, prepare(store, [half(b"%d" % number, key=b"k", order_key=b"k")]), COMMIT)

        batch = shard.next_batch(10, lambda _: None, 1 << 20)

        assert batch is not None
        assert [one.half.value for one in batch.decided] == [b"0", b"1", b"2"]


def test_what_was_to_be_decided_again_waits_as_before_while_the_disk_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with store_of(tmp_path) as store:
        opened = store.opened
        # What is due by then waits in memory.
        opened.near_ms = 5e12
        late, held = (prepare(store, [half(deliver_at_ms=due)]).halves[0].transaction_id for due in (4 * 10**12, None))
        for transaction_id in (late, held):
            store.await_decision(decision(transaction_id, "orders", COMMIT, Author.PRODUCER))
        with opened.lock:
            assert not opened.queue.choose(10, lambda _: "t", 1_000), "its target takes nothing"
        discard = decision(held, None, Verdict.DISCARD, Author.OPERATOR)

        def full(*_: object) -> None:
            raise NoRoomError("no room")

        with monkeypatch.context() as patch:
            patch.setattr(Journal, "_write", full)
            with pytest.raises(DecisionNotStoredError, match="no room"):
                store.cancel(late, "orders", 1.0)
            with pytest.raises(DecisionNotStoredError, match="no room"):
                store.await_decision(discard)
        with opened.lock:
            assert late in opened.queue.delays
            assert opened.live[held].held
            assert not opened.live[held].in_flight

        store.cancel(late, "orders", 1.0)
        store.await_decision(discard)

        with opened.lock:
            opened.apply_replacements()
            chosen = opened.queue.choose(10, lambda _: None, 1_000)
        assert [(name, stored.verdict) for name, stored in chosen.items()] == [(held, Verdict.DISCARD)]
        assert [stored.transaction_id for stored in pending_in(store)] == [held]


@pytest.mark.parametrize(("is_full", "looks"), [(False, True), (True, True), (True, False)])
def test_what_is_just_discarded_is_not_published_when_what_stood_before_it_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_full: bool, looks: bool
) -> None:
    with store_of(tmp_path) as store:
        opened, shard = store.opened, shard_of(store)
        before, discarded, last = (
            prepare(store, [half(key=b"k", order_key=order)]).halves[0].transaction_id for order in (None, b"k", b"k")
        )
        for transaction_id in (before, discarded, last):
            store.await_decision(decision(transaction_id, "orders", COMMIT, Author.PRODUCER))
        refused = shard.next_batch(10, lambda pending: "t" if pending.transaction_id == before else None, 1_000)
        assert refused is None, "what stands behind it waits, too"
        write, meanwhile = Journal._write, []

        def during_the_write(self: Journal, *args: object) -> object:
            # The coordinator's thread goes on: what stood in front is published.
            opened.mark_published([opened.live[before]])
            if looks:
                meanwhile.append(shard.next_batch(10, lambda _: None, 1_000))
            if is_full:
                raise NoRoomError("no room")
            return write(self, *args)  # type: ignore[arg-type]

        with monkeypatch.context() as patch:
            patch.setattr(Journal, "_write", during_the_write)
            try:
                store.await_decision(decision(discarded, None, Verdict.DISCARD, Author.OPERATOR))
            except DecisionNotStoredError:
                assert is_full

        assert meanwhile == [None] * looks
        shard.release("t", lambda _: False)
        batch = shard.next_batch(10, lambda _: None, 1_000)
        assert batch is not None
        verdicts = {one.transaction_id: one.verdict for one in batch.decided}
        assert verdicts == {discarded: COMMIT if is_full else Verdict.DISCARD, last: COMMIT}
        assert not is_full or list(verdicts) == [discarded, last]
