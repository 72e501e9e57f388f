"""The redo log at every byte: cut, torn, flipped, followed by garbage; and its codec."""

from __future__ import annotations

import os
import random
from pathlib import Path
from uuid import uuid4

import hypothesis.strategies as st
import pytest
from hypothesis import given

from penstock.errors import MessageFormatError, StoreDamagedError
from penstock.transactions.stores.file.log.entries import (
    Checked,
    Decided,
    Entry,
    Prepared,
    Settled,
    decode_entry,
    encode_entry,
)
from penstock.transactions.stores.file.log.folder import Folder
from penstock.transactions.stores.file.log.frames import HEADER_BYTES, SegmentHeader, encode_frame, encode_header, scan
from penstock.transactions.stores.file.log.redo import MARK, SUFFIX, NoRoomError, RedoLog
from penstock.transactions.wire.half import Half
from penstock.transactions.wire.ids import new_id
from penstock.transactions.wire.ops import Author, Verdict
from simulation.torn_disk import TornDisk

SEGMENT = 700
FRAMES = [[(1, b"a" * 40)], [(2, b""), (3, b"bb")], [(1, b"c" * 90)], [(4, b"\xf5PTX" * 8)], [(1, b"e")]]


def written(frames: int = len(FRAMES)) -> tuple[TornDisk, list[int]]:
    """Return a disk with a log of some frames in one segment, and where each ends."""
    disk = TornDisk(random.Random(1))  # noqa: S311 - the same disk again
    log = RedoLog(disk, SEGMENT, lambda: 0)
    log.open()
    log.recover()
    ends = [log.end]
    for frame in FRAMES[:frames]:
        log.append(frame)
        ends.append(log.end)
    return disk, ends


def opened(disk: Folder) -> tuple[RedoLog, list[tuple[int, bytes]]]:
    """Open the log on a disk; return it with its records."""
    log = RedoLog(disk, SEGMENT, lambda: 0)
    log.open()
    found = [(record.kind, record.payload) for record in log.records()]
    log.recover()
    return log, found


def flat(frames: int) -> list[tuple[int, bytes]]:
    return [record for frame in FRAMES[:frames] for record in frame]


def only(disk: TornDisk) -> bytearray:
    """Return the contents of the only segment."""
    (name,) = (name for name in disk.names() if name.endswith(SUFFIX))
    return disk.files[name].cached


def test_every_prefix_that_a_crash_may_leave_opens_with_all_frames_that_are_whole() -> None:
    _, ends = written()
    for length in range(HEADER_BYTES, ends[-1] + 1):
        disk, _ = written()
        del disk.files[MARK]
        del only(disk)[length:]

        log, found = opened(disk)

        whole = sum(end <= length for end in ends[1:])
        assert found == flat(whole), length
        assert log.end == ends[whole]
        # It goes on from there, and what comes is there the next time.
        log.append([(9, b"next")])
        assert opened(disk)[1] == [*flat(whole), (9, b"next")]


def test_every_prefix_short_of_what_was_acknowledged_is_refused_and_left_alone() -> None:
    _, ends = written()
    for length in range(ends[-1]):
        disk, _ = written()
        del only(disk)[length:]
        before = bytes(only(disk))

        with pytest.raises(StoreDamagedError, match="backup"):
            opened(disk)

        assert only(disk) == before


@pytest.mark.parametrize("marked", [True, False], ids=["marked", "mark lost"])
def test_every_byte_that_changes_in_what_was_acknowledged_is_seen(marked: bool) -> None:
    _, ends = written()
    # Without the mark the last frame may be one that was never acknowledged.
    last = ends[-1] if marked else ends[-2]
    for at in range(last):
        for spoilt in (0x01, 0x80, 0xFF):
            disk, _ = written()
            if not marked:
                del disk.files[MARK]
            only(disk)[at] ^= spoilt

            with pytest.raises(StoreDamagedError):
                opened(disk)


def test_every_torn_last_frame_is_wiped_and_the_log_goes_on() -> None:
    chance = random.Random(3)  # noqa: S311 - the same garbage again
    _, ends = written()
    for at in range(ends[-2], ends[-1]):
        for tail in (b"", bytes(20), chance.randbytes(20), b"\xf5PTX" * 5):
            disk, _ = written()
            mark = written(len(FRAMES) - 1)[0].files[MARK]
            disk.files[MARK] = mark
            content = only(disk)
            content[at] ^= 0x40
            content[ends[-1] : ends[-1] + len(tail)] = tail

            log, found = opened(disk)

            assert found == flat(len(FRAMES) - 1)
            assert log.torn_bytes > 0
            assert not any(only(disk)[ends[-2] :])
            log.append([(9, b"next")])
            assert opened(disk)[1] == [*found, (9, b"next")]


def test_a_segment_that_is_missing_is_seen() -> None:
    for gone in range(3):
        disk = TornDisk(random.Random(1))  # noqa: S311 - the same disk again
        log, _ = opened(disk)
        for _ in range(3):
            # Two do not fit into a segment.
            log.append([(1, bytes(SEGMENT // 2))])
        names = [name for name in disk.names() if name.endswith(SUFFIX)]
        assert len(names) == 3
        disk.remove(names[gone])

        with pytest.raises(StoreDamagedError, match=r"gone|does not continue|acknowledged up to"):
            opened(disk)


def test_a_real_folder_keeps_a_log(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    log, _ = opened(folder)
    places = [record.place for frame in FRAMES for record in log.append(frame)]
    log.append([(7, b"x" * 4_000)])
    end = log.end
    folder.close()
    # A frame that was being written when the machine went down.
    last = max(tmp_path.glob(f"*{SUFFIX}"))
    with last.open("r+b") as file:
        file.seek(end - int(last.stem))
        file.write(b"\xf5PTX torn")

    again, found = opened(Folder(tmp_path))

    assert found == [*flat(len(FRAMES)), (7, b"x" * 4_000)]
    assert (again.end, again.store_id, again.torn_bytes) == (end, log.store_id, 9)
    assert again.read(places[0], 9 + 40).payload == b"a" * 40
    with pytest.raises(StoreDamagedError):
        again.read(places[0] + 1, 9 + 40)


def test_a_full_disk_is_distinguished_from_a_broken_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)

    with pytest.raises(NoRoomError, match="No space left"):
        RedoLog(Folder(tmp_path), SEGMENT, lambda: 0).open()


@given(data=st.binary(max_size=300), frames=st.lists(st.lists(st.tuples(st.integers(0, 255), st.binary(max_size=40)))))
def test_any_bytes_behind_good_frames_scan_to_the_frames_alone(
    data: bytes, frames: list[list[tuple[int, bytes]]]
) -> None:
    header = SegmentHeader(uuid4(), 5_000, 7, 0, 99)
    good = b"".join(encode_frame(7 + number, 99, frame)[0] for number, frame in enumerate(frames))

    found = scan(encode_header(header) + good + data, header)

    assert [(record.kind, record.payload) for record in found.records] == [one for frame in frames for one in frame]
    assert (found.end, found.sequence, found.stray) == (HEADER_BYTES + len(good), 7 + len(frames), None)


HALF = Half(new_id(), "g", "t", 3, b"k", None, (("h", b"1"), ("none", None)), 5, 9, (1, 2), b"order", "0/1")
ENTRIES: list[Entry] = [
    Prepared(1, 2, 3, 4, Verdict.COMMIT, 5, (HALF, HALF._replace(part=(2, 2), key=None, value=b"v", headers=()))),
    Decided(new_id(), Verdict.DISCARD, Author.OPERATOR, 7, "eve@host"),
    Checked(new_id(), 2, 3),
    Settled((new_id(), new_id())),
]


@pytest.mark.parametrize("entry", ENTRIES, ids=lambda entry: type(entry).__name__)
def test_an_entry_reads_as_it_was_written_and_no_part_of_it_does(entry: Entry) -> None:
    kind, payload = encode_entry(entry)

    assert decode_entry(kind, payload) == entry
    # A list of ids, and the name of an actor, may end anywhere.
    fixed = {Prepared: len(payload), Checked: len(payload), Decided: 26, Settled: 0}[type(entry)]
    for length in range(fixed):
        with pytest.raises(MessageFormatError):
            decode_entry(kind, payload[:length])


@given(kind=st.integers(0, 6), payload=st.binary(max_size=200))
def test_any_bytes_read_as_an_entry_or_are_refused_as_one(kind: int, payload: bytes) -> None:
    try:
        entry = decode_entry(kind, payload)
    except MessageFormatError:
        return
    assert encode_entry(entry) == (kind, payload)
