"""The state table: its bytes, its files, and one timer for each."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest

from penstock.transactions import new_id
from penstock.transactions.stores.file.ledger import Kept
from penstock.transactions.stores.file.table import RECORD_BYTES, SUFFIX, State, Table, read_table
from penstock.transactions.wire.ops import Verdict


def kept(number: int = 1, verdict: Verdict | None = None) -> Kept:
    return Kept(new_id(), "orders", number, 5_000, 0, 0, verdict, 0, 1 << 40, 77, None, None, None, ("t",))


def test_a_record_takes_24_bytes_and_its_checksum_covers_all_of_them(tmp_path: Path) -> None:
    table = Table(tmp_path, 4)
    table.add(kept())
    (path,) = tmp_path.glob(f"*{SUFFIX}")
    (record,) = read_table(tmp_path)
    assert (record.place, record.size, record.birth_s, record.state) == (1 << 40, 77, 5, State.PREPARED)
    content = path.read_bytes()
    assert len(content) == 4_096 + 4 * RECORD_BYTES
    assert struct.unpack_from(">QII", content, 4_096) == (1 << 40, 77, 5)

    for at in range(4_096, 4_096 + RECORD_BYTES):
        path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        assert read_table(tmp_path) == []

    table.close()


def test_a_file_goes_when_all_in_it_are_settled_and_what_another_run_left_is_replaced(tmp_path: Path) -> None:
    table = Table(tmp_path, 2)
    rows = [kept(number) for number in range(5)]
    for row in rows:
        table.add(row)
    assert [row.slot for row in rows] == [0, 1, 2, 3, 4]
    assert len(list(tmp_path.glob(f"*{SUFFIX}"))) == 3

    table.remove(rows[0])
    assert len(list(tmp_path.glob(f"*{SUFFIX}"))) == 3
    table.remove(rows[1])
    table.move(rows[2])
    assert rows[2].slot == 5
    table.remove(rows[3])

    assert [path.stem.lstrip("0") for path in sorted(tmp_path.glob(f"*{SUFFIX}"))] == ["3"]
    assert list(table.live()) == [rows[4], rows[2]]
    table.close()
    Table(tmp_path, 2).close()
    assert list(tmp_path.glob(f"*{SUFFIX}")) == []


def test_each_file_has_one_timer_that_goes_off_for_the_first_of_its_undecided(tmp_path: Path) -> None:
    table = Table(tmp_path, 4)
    rows = [kept(number) for number in range(8)]
    for number, row in enumerate(rows):
        table.add(row)
        table.plan(row, 10.0 + number)
    assert table.next_due() == 10.0

    assert table.take_due(9.0, 100) == []
    assert table.take_due(11.5, 100) == rows[:2]
    assert table.next_due() == 12.0
    for row in rows[:2]:
        table.plan(row, 50.0)
    # A decided one is asked about no more, and a round takes no more than it has time for.
    rows[3].verdict = Verdict.COMMIT
    assert table.take_due(20.0, 3) == [rows[2], rows[4], rows[5]]
    for row in (rows[2], rows[4], rows[5]):
        table.plan(row, 60.0)
    assert table.take_due(20.0, 3) == rows[6:]
    for row in rows[6:]:
        table.plan(row, 60.0)
    assert table.next_due() == 50.0
    table.close()


def test_a_disk_without_room_for_the_table_costs_the_view_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    table = Table(tmp_path, 2)
    row = kept()
    table.add(row)
    table.plan(row, 1.0)

    assert table.take_due(2.0, 10) == [row]
    assert read_table(tmp_path) == []
    table.close()
