"""Operators of a file store: the audit, resumed transactions, and readers in another process."""

from __future__ import annotations

import hashlib
import time
from functools import partial
from pathlib import Path

import pytest
from confluent_kafka import Producer
from conformance.store_cases import NO_CHECKS, FileBench, decide, prepare, settled
from file_stores import half, store_of

from commands import commands
from penstock.errors import (
    HalfNotStoredError,
    PenstockError,
    StoreDamagedError,
    TransactionError,
    TransactionRefusedError,
)
from penstock.transactions import TransactionState, new_id
from penstock.transactions.operator.audit import AuditLog
from penstock.transactions.stores.file.administration import FileAdministration, read_pending
from penstock.transactions.stores.file.log.frames import FRAME_BYTES, HEADER_BYTES
from penstock.transactions.stores.file.log.journal import Journal
from penstock.transactions.stores.file.log.redo import SUFFIX
from penstock.transactions.stores.file.log.table import ROWS
from penstock.transactions.stores.file.store import FileStore
from penstock.transactions.wire.half import encode_discarded
from penstock.transactions.wire.ops import Verdict
from waiting import wait_until

COMMIT, ROLLBACK, UNKNOWN, DISCARD = Verdict.COMMIT, Verdict.ROLLBACK, Verdict.UNKNOWN, Verdict.DISCARD


def administration_of(bench: FileBench) -> FileAdministration:
    store = bench.store
    assert isinstance(store, FileStore)
    made = store.administration()
    assert isinstance(made, FileAdministration)
    return made


def test_an_operator_takes_back_what_is_not_due_learns_what_stands_and_is_found_in_the_audit_log(
    bench: FileBench, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    coordinator, administration = bench.coordinator(**NO_CHECKS), administration_of(bench)
    far_ms = 4_000_000_000_000
    later, other = (bench.send(COMMIT, bench.half(b"v", deliver_at_ms=far_ms)).halves[0] for _ in range(2))
    wait_until(lambda: coordinator.statistics().delayed == 2)

    administration.decide(later.transaction_id, ROLLBACK, "ann@host", "the customer called")
    with pytest.raises(TransactionRefusedError, match="COMMIT was decided before"):
        administration.decide(other.transaction_id, DISCARD, "ann@host")
    shown = commands(monkeypatch, capsys)(
        *("tx", "show", later.transaction_id, "--file", str(bench.folder)),
        *("--bootstrap-servers", bench.servers, "--prefix", bench.prefix),
    )

    statistics = coordinator.statistics()
    assert (statistics.rolled_back, statistics.delayed, statistics.pending) == (1, 1, 1)
    assert f"{later.transaction_id}\n  state       settled\n" in shown.out
    assert "rollback  ann@host  the customer called" in shown.out


def test_a_claim_that_came_to_nothing_is_taken_up_again_and_what_is_forged_or_in_part_is_not_brought_back(
    bench: FileBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator, administration = bench.coordinator(**NO_CHECKS), administration_of(bench)
    lost, forged = bench.half(b"lost"), bench.half(b"forged", topic=bench.discarded)
    torn = bench.half(b"torn", part=(2, 2))
    # A record of the discarded topic may be forged.
    producer = Producer({"bootstrap.servers": bench.servers})
    for one in (lost, forged, torn):
        producer.produce(bench.discarded, one.value, headers=encode_discarded(one, "checks exhausted", 1))
    assert producer.flush(30) == 0

    with pytest.raises(TransactionError, match="forged"):
        administration.resume(forged.transaction_id, "ann@host")
    with pytest.raises(TransactionError, match="only 1 of 2 messages"):
        administration.resume(torn.transaction_id, "ann@host")
    with monkeypatch.context() as patch:
        full = HalfNotStoredError("the disk is full")
        patch.setattr(FileStore, "prepare", lambda _self, _halves, callback: callback(full))
        with pytest.raises(PenstockError, match="again=True"):
            administration.resume(lost.transaction_id, "ann@host")
        patch.setattr(FileStore, "prepare", lambda *_: None)
        patch.setattr(administration, "_answer_s", 0.1)
        with pytest.raises(PenstockError, match=r"did not answer within 0.1 s.*again=True"):
            administration.resume(lost.transaction_id, "ann@host", again=True)
    with pytest.raises(TransactionError, match="brought back before"):
        administration.resume(lost.transaction_id, "ann@host")
    administration.resume(lost.transaction_id, "ann@host", again=True)
    administration.decide(lost.transaction_id, COMMIT, "ann@host")
    settled(coordinator, committed=1)

    assert bench.seen() == [b"lost"]


def test_a_decision_that_cannot_be_written_down_is_not_made(bench: FileBench, monkeypatch: pytest.MonkeyPatch) -> None:
    transaction_id = bench.prepare(bench.half(b"v")).halves[0].transaction_id
    administration = administration_of(bench)

    def refuses(*_: object) -> int:
        raise PenstockError("no room for the audit log; nothing was done")

    with monkeypatch.context() as patch:
        patch.setattr(AuditLog, "write", refuses)
        with pytest.raises(PenstockError, match="nothing was done"):
            administration.decide(transaction_id, COMMIT, "ann@host")
    shown = administration.show(transaction_id)

    assert shown is not None
    assert shown.decided is None


def test_another_process_sees_what_is_pending_and_changes_nothing(tmp_path: Path) -> None:
    with store_of(tmp_path) as store:
        first, held = half(key=b"k", order_key=b"k"), half(key=b"k", order_key=b"k")
        late, gone, given_up = half(deliver_at_ms=int(time.time() * 1000) + 900_000), half(), half(group="others")
        prepared = {one.transaction_id: prepare(store, [one]) for one in (first, held, late, gone, given_up)}
        for one, verdict in ((held, COMMIT), (late, COMMIT), (gone, ROLLBACK), (given_up, DISCARD)):
            decide(store, prepared[one.transaction_id], verdict)
        before = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in tmp_path.iterdir()}

        shown = read_pending(tmp_path)

        assert {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in tmp_path.iterdir()} == before
        inside = store.administration().pending()
    assert [one.transaction_id for one in shown] == [one.transaction_id for one in (first, held, late, given_up)]
    assert [one.decided for one in shown] == [None, TransactionState.COMMIT, TransactionState.COMMIT, None]
    assert [one.held_by for one in shown] == [None, first.transaction_id, None, None]
    assert [one.waits_for for one in shown] == ["", "", "its time", "the discarded topic"]
    assert [(one.group, one.topics) for one in shown] == [("orders", ("t",))] * 3 + [("others", ("t",))]
    same = ("transaction_id", "group", "topics", "check_count", "decided", "deliver_at_ms", "held_by")
    assert [[getattr(one, name) for name in same] for one in shown] == [
        [getattr(one, name) for name in same] for one in inside
    ]
    # No process has it open now, and it can still be read; also a single one, with those before it.
    assert read_pending(tmp_path)[0].transaction_id == first.transaction_id
    assert [(one.transaction_id, one.held_by) for one in read_pending(tmp_path, held.transaction_id)] == [
        (held.transaction_id, first.transaction_id)
    ]
    assert [one.transaction_id for one in read_pending(tmp_path, late.transaction_id)] == [late.transaction_id]
    assert read_pending(tmp_path, "nonsense") == []


def test_a_torn_end_is_passed_over_damage_is_reported_and_so_is_a_folder_without_a_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.transactions.stores.file.administration._REREAD_DELAY_S", 0.0)
    folder = tmp_path / "store"
    with store_of(folder) as store:
        ids = [prepare(store, [half()]).halves[0].transaction_id for _ in range(2)]
        end = store.opened.redo.end
    (segment,) = folder.glob(f"*{SUFFIX}")
    content = segment.read_bytes()

    # The table is being made, and has no room yet.
    (folder / ROWS).write_bytes(b"")
    assert [one.transaction_id for one in read_pending(folder)] == ids
    # As after a crash of the machine: the table shows nothing that can be trusted.
    (folder / ROWS).write_bytes(bytes(500))
    segment.write_bytes(content[: end - 1])
    assert [one.transaction_id for one in read_pending(folder)] == ids[:1]
    broken = bytearray(content)
    broken[HEADER_BYTES + FRAME_BYTES + 40] ^= 1
    segment.write_bytes(broken)
    with pytest.raises(StoreDamagedError, match="is damaged from byte"):
        read_pending(folder)
    with pytest.raises(PenstockError, match="there is no file store"):
        read_pending(tmp_path)
    assert not (tmp_path / "lock").exists()


def test_what_does_not_fit_together_is_read_again_however_long_reading_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.transactions.stores.file.administration._REREAD_DELAY_S", 0.0)
    tries, look, clock = [], Journal.open_read_only, time.monotonic

    def slow(self: Journal) -> None:
        # A segment that it has not heard of takes what it reads, and that takes an hour.
        tries.append(self)
        monkeypatch.setattr(time, "monotonic", lambda: clock() + 3_600 * len(tries))
        if len(tries) < 4:
            raise StoreDamagedError("it is gone")
        look(self)

    with store_of(tmp_path) as store:
        pending = prepare(store, [half()]).halves[0].transaction_id
        monkeypatch.setattr(Journal, "open_read_only", slow)
        listed = read_pending(tmp_path)

    assert [shown.transaction_id for shown in listed] == [pending]
    assert len(tries) == 4


def test_a_store_that_adds_segments_all_the_time_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load = Journal.load

    with store_of(tmp_path) as store:
        kept = prepare(store, [half()]).halves[0].transaction_id
        replaced = [prepare(store, [half()])]

        def load_meanwhile(self: Journal, number: int) -> object:
            # The table gives the record of a settled transaction to the next one, whose halves begin a segment.
            if number == 1:
                decide(store, replaced.pop(), ROLLBACK)
                replaced.append(prepare(store, [half(bytes(4_000))]))
            return load(self, number)

        monkeypatch.setattr(Journal, "load", load_meanwhile)
        listed = read_pending(tmp_path)

    assert [shown.transaction_id for shown in listed] == [kept, replaced[0].halves[0].transaction_id]


def test_the_command_line_looks_into_a_folder_and_says_where_to_decide(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tx = partial(commands(monkeypatch, capsys), "tx")
    place = ("--file", str(tmp_path / "store"))
    with store_of(tmp_path / "store") as store:
        first = half(group="shop")
        prepared = prepare(store, [first])
        prepare(store, [half(group="others")])
        decide(store, prepared, COMMIT)

        listed, of_shop = tx("ls", *place), tx("ls", *place, "--group", "shop")
        shown, unknown = tx("show", first.transaction_id, *place), tx("show", new_id(), *place)
        refused = [tx(command, first.transaction_id, *place) for command in ("commit", "rollback", "discard", "resume")]
    in_its_topic = tx("ls", *place, "--discarded")
    only_in_kafka = [
        tx("show", first.transaction_id, *place, "--payload"),
        tx("resume", first.transaction_id, *place, "--again"),
    ]
    nowhere = tx("ls", "--file", str(tmp_path / "none"))

    assert (listed.code, of_shop.code, shown.code) == (0, 0, 0), listed.err
    assert f"2 pending transactions in {tmp_path / 'store'}" in listed.out
    assert "1 pending transaction in" in of_shop.out
    assert "waits for   its process, to publish it" in shown.out
    assert (unknown.code, "is neither pending nor discarded" in unknown.err) == (1, True)
    assert [one.code for one in refused] == [2] * 4
    assert (
        f"call store.administration().decide('{first.transaction_id}', Verdict.COMMIT, actor) there" in refused[0].err
    )
    assert f"call store.administration().resume('{first.transaction_id}', actor) there" in refused[3].err
    assert [(one.code, "is for a store in Kafka" in one.err) for one in only_in_kafka] == [(2, True)] * 2
    assert (in_its_topic.code, "use --prefix instead" in in_its_topic.err) == (2, True)
    assert (nowhere.code, "there is no file store" in nowhere.err) == (1, True)
    assert not (tmp_path / "none").exists()
