"""The state table of a file store: its cost, what opening reads, and damage of every kind."""

from __future__ import annotations

import random
import resource
import time
import zlib
from collections.abc import Callable
from pathlib import Path

import hypothesis.strategies as st
import pytest
from conformance.store_cases import NO_CHECKS, FileBench, decide, prepare, settled
from file_stores import COMMIT, NOWHERE, ROLLBACK, half, pending_in, store_of
from hypothesis import given

from penstock.transactions.core.check_plan import CheckPolicy
from penstock.transactions.stores.file import checks, shard
from penstock.transactions.stores.file.checks import TableScan
from penstock.transactions.stores.file.log.entries import Prepared, encode_entry, replay
from penstock.transactions.stores.file.log.folder import Folder
from penstock.transactions.stores.file.log.frames import Record
from penstock.transactions.stores.file.log.redo import SUFFIX
from penstock.transactions.stores.file.log.table import (
    KEYS,
    ROWS,
    STOPPED,
    Row,
    State,
    StateTable,
    in_memory,
    ms_of,
    tick_of,
)
from penstock.transactions.stores.file.open_store import OpenStore
from penstock.transactions.stores.file.store import FileStore
from penstock.transactions.stores.relayed_store import Decide, Outcome, Prepare
from penstock.transactions.stores.shards import CheckTerms
from penstock.transactions.wire.ids import id_bytes, new_id
from penstock.transactions.wire.ops import Author, Verdict
from waiting import wait_until

DAY_MS = 86_400_000


def delayed(folder: Path, count: int) -> OpenStore:
    """Return a store with so many committed transactions that are due tomorrow."""
    folder.mkdir()
    store, now_ms = OpenStore(Folder(folder), 8 << 20), int(time.time() * 1000)
    store.open()
    for begin in range(0, count, 1_000):
        halves = [
            half(b"v" * 100, key=b"%d" % n, deliver_at_ms=now_ms + DAY_MS + n) for n in range(begin, begin + 1_000)
        ]
        store.write([Prepare((one,), now_ms) for one in halves])
        store.write([Decide(one.transaction_id, "orders", COMMIT, Author.PRODUCER, 0, now_ms) for one in halves])
    return store


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


@pytest.mark.parametrize("count", [10_000, pytest.param(200_000, marks=pytest.mark.thorough)])
def test_delayed_transactions_cost_less_than_150_bytes_of_memory_each(tmp_path: Path, count: int) -> None:
    # What the code itself takes, and a segment in the making.
    delayed(tmp_path / "first", 1_000)
    before = resident_bytes()

    store = delayed(tmp_path / "store", count)
    TableScan(store.table, CheckPolicy(6.0, 30.0, 15)).run()

    assert store.table.count(State.DELAYED) == count
    assert not store.live
    # A million: 150 MB.
    assert resident_bytes() - before < 150 * max(count, 100_000)


def test_opening_after_a_clean_stop_reads_the_table_and_of_the_log_its_last_segment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with store_of(tmp_path) as store:
        stored = [prepare(store, [half(b"x" * 1_000, deliver_at_ms=4_000_000_000_000)]) for _ in range(30)]
        for one in stored[::2]:
            decide(store, one, COMMIT)
        before = [(one.transaction_id, one.verdict, one.decided) for one in pending_in(store)]
    segments = sorted(tmp_path.glob(f"*{SUFFIX}"))
    assert len(segments) > 3
    whole: list[str] = []
    read = Folder.read

    def reading(self: Folder, name: str, offset: int = 0, size: int = -1) -> bytes:
        if size < 0:
            whole.append(name)
        return read(self, name, offset, size)

    with monkeypatch.context() as patch:
        patch.setattr(Folder, "read", reading)
        again = store_of(tmp_path)
        again.start()
    try:
        assert not again.opened.was_rebuilt
        assert not again.opened.live
        assert [(one.transaction_id, one.verdict, one.decided) for one in pending_in(again)] == before
    finally:
        again.stop(30)
    assert whole == [segments[-1].name, STOPPED]


def _flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2 if path.name == STOPPED else 30] ^= 1
    path.write_bytes(content)


def _nothing(folder: Path, former: dict[str, bytes]) -> None:
    """An older penstock had no table."""
    for name in (ROWS, KEYS, STOPPED):
        (folder / name).unlink()


def _missing(name: str) -> Callable[[Path, dict[str, bytes]], None]:
    return lambda folder, _: (folder / name).unlink()


def _torn(name: str) -> Callable[[Path, dict[str, bytes]], None]:
    return lambda folder, _: _flip(folder / name)


def _older(folder: Path, former: dict[str, bytes]) -> None:
    for name, content in former.items():
        (folder / name).write_bytes(content)


def _of_another_version(folder: Path, former: dict[str, bytes]) -> None:
    content = b"\1" + (folder / STOPPED).read_bytes()[1:-4]
    (folder / STOPPED).write_bytes(content + zlib.crc32(content).to_bytes(4, "big"))


@pytest.mark.parametrize(
    "spoil",
    [
        _nothing,
        *map(_missing, (ROWS, KEYS, STOPPED)),
        *map(_torn, (ROWS, KEYS, STOPPED)),
        _older,
        _of_another_version,
    ],
    ids=["none", "no rows", "no keys", "no seal", "torn rows", "torn keys", "torn seal", "older", "of a version"],
)
def test_a_table_that_does_not_fit_its_log_is_made_again(
    tmp_path: Path, spoil: Callable[[Path, dict[str, bytes]], None]
) -> None:
    with store_of(tmp_path) as store:
        first = prepare(store, [half()])
    former = {name: (tmp_path / name).read_bytes() for name in (ROWS, KEYS, STOPPED)}
    with store_of(tmp_path) as store:
        decide(store, first, COMMIT)
        prepare(store, [half(order_key=b"k")])
        prepare(store, [half(deliver_at_ms=4_000_000_000_000)])
        before = [(one.transaction_id, one.verdict, one.decided, one.half.line) for one in pending_in(store)]
    spoil(tmp_path, former)

    with store_of(tmp_path) as again:
        assert again.opened.was_rebuilt
        assert [(one.transaction_id, one.verdict, one.decided, one.half.line) for one in pending_in(again)] == before
    with store_of(tmp_path) as again:
        assert not again.opened.was_rebuilt


def test_a_table_that_is_newer_than_its_log_is_not_believed(tmp_path: Path) -> None:
    with store_of(tmp_path / "store") as store:
        kept = prepare(store, [half()]).halves[0].transaction_id
    log = {path: path.read_bytes() for path in (tmp_path / "store").iterdir() if not path.name.startswith("table")}
    with store_of(tmp_path / "store") as store:
        prepare(store, [half()])
    for path, content in log.items():
        path.write_bytes(content)

    with store_of(tmp_path / "store") as again:
        assert again.opened.was_rebuilt
        assert [one.transaction_id for one in pending_in(again)] == [kept]


def test_what_is_due_soon_comes_out_of_the_table_and_is_published_in_its_time(
    bench: FileBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (checks, shard):
        monkeypatch.setattr(module, "NEAR_S", 0.4)
    coordinator = bench.coordinator(**NO_CHECKS)
    opened, sent = bench.file_store.opened, 0

    # A slow machine takes longer until both wait.
    for wait_ms in (1_600, 8_000, 40_000):
        due_ms = int(time.time() * 1000) + wait_ms
        for value, at_ms in ((b"2", due_ms + 800), (b"1", due_ms)):
            bench.send(COMMIT, bench.half(value, deliver_at_ms=at_ms))
        live, delayed = len(opened.live), coordinator.statistics().delayed
        sent += 2
        if time.time() * 1000 < due_ms - 400:
            break
        settled(coordinator, committed=sent)
    assert (live, delayed) == (0, 2)
    statistics = settled(coordinator, committed=sent)

    assert statistics.delayed == 0
    assert bench.seen()[-2:] == [b"1", b"2"]
    assert time.time() * 1000 >= due_ms + 800


def test_undecided_transactions_are_found_by_the_scan_when_their_time_has_come_and_wait_in_the_table_then(
    bench: FileBench,
) -> None:
    prepared = [bench.prepare(bench.half(b"%d" % number)).halves[0].transaction_id for number in range(3)]
    immune = bench.prepare(bench.half(b"immune", immunity_ms=600_000)).halves[0].transaction_id
    opened = bench.file_store.opened
    bench.coordinator(transaction_timeout=0.2)

    def state_of(transaction_id: str) -> int:
        with opened.lock:
            return next(
                row[4] for number, row in opened.table if opened.table.key(number)[0] == id_bytes(transaction_id)
            )

    with bench.answering(lambda _: Verdict.UNKNOWN) as asked:
        wait_until(lambda: len({one.half.transaction_id for one in asked}) == 3)
        # It was born after the others, so that the scan may find it later.
        wait_until(lambda: state_of(immune) == State.IMMUNE)

    assert {state_of(waiting) for waiting in prepared} <= {State.ASKED, State.ANSWERED}
    assert opened.live.keys().isdisjoint(prepared)
    assert immune not in {one.half.transaction_id for one in asked}


def test_a_decision_that_is_being_written_counts_though_its_transaction_leaves_the_memory_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with store_of(tmp_path) as store:
        opened, sync = store.opened, Folder.sync
        prepared = prepare(store, [half()])

        def park(self: Folder, name: str) -> None:
            # As the scan does with what it asks about.
            with opened.lock:
                opened.unload_if_idle(opened.live[prepared.halves[0].transaction_id])
            sync(self, name)

        with monkeypatch.context() as patch:
            patch.setattr(Folder, "sync", park)
            decide(store, prepared, COMMIT)

        with opened.lock:
            taken = opened.queue.choose(10, lambda _: None, 1_000)
        assert list(taken.values()) == pending_in(store)
        assert [stored.verdict for stored in taken.values()] == [COMMIT]


def test_a_crowd_that_is_due_soon_comes_into_memory_in_portions_by_its_times(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "_NEAR", 3)
    table, now_ms = StateTable(in_memory()), time.time() * 1000
    table.clear()
    ticks = [tick_of(now_ms + 1_000 * seconds) for seconds in (5, 1, 4, 2, 3, 900)]
    numbers = [table.add(id_bytes(new_id()), 0, Row(0, 1, tick, 0, State.DELAYED, 0, 0)) for tick in ticks]
    found = TableScan(table, CheckPolicy(6.0, 30.0, 15))

    until_ms = found.run()

    assert [found.near.pop() for _ in range(3)] == [numbers[1], numbers[3], numbers[4]]
    assert not found.near
    # What is decided to be due later than that waits for the next scan, which comes soon.
    assert until_ms == ms_of(ticks[4])
    assert found.due_at < time.monotonic() + 1


def test_what_is_decided_while_a_crowd_is_due_soon_waits_in_the_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "_NEAR", 3)
    for module in (checks, shard):
        monkeypatch.setattr(module, "NEAR_S", 1e6)
    terms, due_ms = CheckTerms(CheckPolicy(600.0, 600.0, 1), session_s=600.0), int((time.time() + 1e5) * 1000)
    with store_of(tmp_path) as store:
        opened = store.opened
        store.open_shards(terms, lambda: None).due()

        def commit(count: int) -> None:
            for number in range(count):
                decide(store, prepare(store, [half(deliver_at_ms=due_ms + 1_000 * number)]), COMMIT)

        commit(5)
        assert len(opened.live) == 5
        assert opened.shard is not None
        opened.shard.close()
        # The next coordinator finds all of them; none is published.
        again = store.open_shards(terms, lambda: None)
        again.due()
        commit(10)

        # Of these, three are due when the third of the crowd is, or before.
        assert opened.live.keys() == again.queue.all.keys()
        assert len(opened.live) == 5 + 3
        assert opened.table.count(State.DELAYED) == 15


def test_what_an_older_penstock_wrote_again_with_its_decision_is_decided() -> None:
    table, one = StateTable(in_memory()), half(deliver_at_ms=4_000_000_000_000)

    replay([Record(*encode_entry(Prepared(7, 1, 2, 3, COMMIT, 5, (one,))), 64)], table)

    row = table.row(1)
    assert (row.state, row.checks, row.tick) == (State.DELAYED, 2, tick_of(4_000_000_000_000))
    assert table.key(1) == (id_bytes(one.transaction_id), 5)
    assert (table.number, table.decided) == (7, 5)


@given(seed=st.integers(0, 1 << 32), steps=st.integers(1, 3_000))
def test_a_table_finds_what_was_entered_and_nothing_else(seed: int, steps: int) -> None:
    chance = random.Random(seed)  # noqa: S311 - the same table again
    table, known, gone = StateTable(in_memory()), dict[bytes, int](), list[bytes]()
    table.clear()
    for number in range(steps):
        if known and chance.random() < 0.45:
            raw_id = chance.choice([*known])
            record = known.pop(raw_id)
            table.remove_from_index(record)
            table.free(record)
            gone.append(raw_id)
        else:
            raw_id = id_bytes(new_id())
            known[raw_id] = table.add(raw_id, 0, Row(number, 1, tick_of(0), 0, State.BORN, 0, 0))
            table.add_to_index(known[raw_id])

    assert {raw_id: table.find(raw_id) for raw_id in known} == known
    assert not any(map(table.find, gone))
    assert table.used == len(known) == table.count(State.BORN)
    assert {number for number, _ in table} == set(known.values())
    again = StateTable(table._map_file)
    assert not again.unseal(table.seal(b"log"), b"log of another time")
    assert again.unseal(table.seal(b"log"), b"log")
    assert {raw_id: again.find(raw_id) for raw_id in known} == known


def test_a_table_with_free_records_needs_no_room_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with FileStore(tmp_path, bootstrap_servers=NOWHERE) as store:
        stored = store.opened.write([Prepare((half(),), 0) for _ in range(1_000)])
        ids = [transaction.transaction_id for transaction in pending_in(store)]
        monkeypatch.setattr(Folder, "map", full)

        ended = store.opened.write([Decide(one, "orders", ROLLBACK, Author.PRODUCER, 0, 0) for one in ids])
        again = store.opened.write([Prepare((half(),), 0) for _ in range(1_000)])

    assert [*stored, *ended, *again] == [Outcome()] * 3_000
