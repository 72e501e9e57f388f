"""Formats: written records are readable, and garbage is refused with one kind of error (I10)."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import MessageFormatError
from penstock.transactions.wire.done_records import Done, Note, Snapshot, StoredHalf, decode_done, encode_done
from penstock.transactions.wire.half import (
    CHECK_NUMBER,
    MAX_GROUP_BYTES,
    REASON,
    RESERVED_PREFIX,
    CheckRequest,
    Half,
    decode_check_request,
    decode_discarded,
    decode_half,
    encode_check_request,
    encode_discarded,
    encode_half,
)
from penstock.transactions.wire.ids import is_id, new_id
from penstock.transactions.wire.ops import Author, Op, Verdict, decode_ops, encode_ops

ids = st.builds(new_id)
offsets = st.integers(0, (1 << 63) - 1)
partitions = st.integers(0, (1 << 31) - 1)
numbers = st.integers(0, (1 << 16) - 1)
bodies = st.none() | st.binary(max_size=50)
groups = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=30)
names = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20).filter(
    lambda name: not name.startswith(RESERVED_PREFIX)
)
halves = st.builds(
    Half,
    transaction_id=ids,
    group=groups,
    topic=st.from_regex(r"[a-z0-9][a-zA-Z0-9._-]{0,40}", fullmatch=True),
    partition=st.none() | partitions,
    key=bodies,
    value=bodies,
    headers=st.lists(st.tuples(names, bodies), max_size=5).map(tuple),
    immunity_ms=st.none() | offsets,
    deliver_at_ms=st.none() | offsets,
    part=st.none() | st.tuples(st.integers(1, 9), st.integers(9, 1000)),
    order_key=st.none() | st.binary(max_size=20),
    resumed=st.none() | groups,
)
ops = st.builds(
    Op,
    transaction_id=ids,
    verdict=st.sampled_from(Verdict),
    author=st.sampled_from(Author),
    group=groups,
    half_partition=partitions,
    half_offsets=st.lists(offsets, max_size=4).map(tuple),
    check_number=numbers,
    actor=st.just("") | groups,
)
batches = st.tuples(st.lists(ops, min_size=1, max_size=5), groups, partitions, st.booleans()).map(
    lambda drawn: [
        op._replace(
            group=drawn[1], half_partition=drawn[2], **({"half_offsets": (7,), "actor": ""} if drawn[3] else {})
        )
        for op in drawn[0]
    ]
)
counts = st.builds(
    Note,
    transaction_id=ids,
    half_offset=offsets,
    verdict=st.just(Verdict.UNKNOWN),
    check_count=numbers,
    answered_ms=offsets,
    op_offset=st.integers(-1, (1 << 63) - 1),
    op_index=st.integers(0, (1 << 32) - 1),
)
notes = counts | st.builds(
    Note._replace,
    counts,
    verdict=st.sampled_from([Verdict.COMMIT, Verdict.ROLLBACK, Verdict.DISCARD]),
    op_offset=offsets,
)


def snapshotted(note: Note, half: Half, count: int) -> Snapshot:
    """Return a snapshot of a transaction of so many messages."""
    first = half._replace(transaction_id=note.transaction_id)
    parts = [first._replace(part=(number + 1, count) if count > 1 else None) for number in range(count)]
    note = note._replace(half_offset=max(note.half_offset, count))
    return Snapshot(note, tuple(StoredHalf(number, note.answered_ms, part) for number, part in enumerate(parts)))


snapshots = st.builds(snapshotted, notes, halves, st.integers(1, 3))


@given(halves)
def test_a_half_reads_back_as_it_was_written(half: Half) -> None:
    assert decode_half(half.key, half.value, encode_half(half)) == half


@given(halves, partitions, offsets, numbers)
def test_a_check_request_reads_back_as_it_was_written(half: Half, partition: int, offset: int, number: int) -> None:
    request = CheckRequest(half, partition, offset, number)

    assert decode_check_request(half.key, half.value, encode_check_request(request)) == request


@given(batches)
def test_a_batch_of_ops_reads_back_as_it_was_written(batch: list[Op]) -> None:
    assert decode_ops(encode_ops(batch)) == batch


@given(st.lists(notes, max_size=5), st.lists(snapshots, max_size=2))
def test_a_done_record_reads_back_as_it_was_written(written: list[Note], snapshotted: list[Snapshot]) -> None:
    assert decode_done(encode_done(written, snapshotted)) == Done(written, snapshotted)


@pytest.mark.parametrize("verdict", [Verdict.COMMIT, Verdict.ROLLBACK, Verdict.DISCARD, Verdict.TICK])
def test_a_done_record_that_ends_a_transaction_without_a_decision_is_refused(verdict: Verdict) -> None:
    with pytest.raises(MessageFormatError, match="done record"):
        decode_done(encode_done([Note(new_id(), 7, verdict, 0, 0)]))


def test_a_snapshot_whose_halves_are_not_those_of_one_transaction_is_refused() -> None:
    half = Half(new_id(), "orders", "topic", None, None, b"v", (), None)
    note = Note(half.transaction_id, 7, Verdict.UNKNOWN, 0, 0)
    first, second = half._replace(part=(1, 2)), half._replace(part=(2, 2))

    for halves in (
        (),
        (StoredHalf(7, 0, half._replace(transaction_id=new_id())),),
        (StoredHalf(8, 0, half),),
        (StoredHalf(6, 0, half), StoredHalf(7, 0, half)),
        (StoredHalf(6, 0, first), StoredHalf(7, 0, first)),
        (StoredHalf(7, 0, first), StoredHalf(7, 0, second)),
        (StoredHalf(6, 0, first), StoredHalf(7, 0, second._replace(group="others"))),
        (StoredHalf(6, 0, first), StoredHalf(7, 0, second._replace(part=(2, 3)))),
    ):
        with pytest.raises(MessageFormatError, match="done record"):
            decode_done(encode_done((), [Snapshot(note, halves)]))
    whole = Snapshot(note, (StoredHalf(6, 0, first), StoredHalf(7, 0, second)))
    assert decode_done(encode_done((), [whole])).snapshots == [whole]


def test_a_header_name_that_no_client_writes_is_refused_in_a_snapshot() -> None:
    half = Half(new_id(), "orders", "topic", None, None, b"v", (("a\0b", b"v"),), None)
    note = Note(half.transaction_id, 7, Verdict.UNKNOWN, 0, 0)

    with pytest.raises(MessageFormatError, match="zero byte"):
        decode_done(encode_done((), [Snapshot(note, (StoredHalf(7, 0, half),))]))


def test_a_half_of_a_group_that_no_decision_could_name_is_refused() -> None:
    longest = Half(new_id(), "g" * MAX_GROUP_BYTES, "topic", None, None, b"v", (), None)

    assert decode_half(None, b"v", encode_half(longest)) == longest
    for headers in ((), (("h", b"v"),)):
        with pytest.raises(MessageFormatError, match="200 bytes"):
            decode_half(None, b"v", encode_half(longest._replace(group="g" * 201, headers=headers)))


@pytest.mark.parametrize("part", [b"", b"0/2", b"3/2", b"1/0", b"1/1001", b"01/2", b"1/2/3", b"-1/2", None])
def test_a_part_that_is_none_is_refused(part: bytes | None) -> None:
    half = Half(new_id(), "orders", "topic", None, None, b"v", (), None)

    with pytest.raises(MessageFormatError, match="penstock-part"):
        decode_half(None, b"v", [*encode_half(half), ("penstock-part", part)])


@given(halves, numbers)
def test_a_discarded_record_holds_all_of_the_half(half: Half, checks: int) -> None:
    headers = encode_discarded(half, "checks exhausted", checks)

    assert decode_discarded(half.key, half.value, headers) == (half, "checks exhausted", checks)


def test_a_number_of_checks_that_none_is_is_refused_in_a_discarded_record() -> None:
    half = Half(new_id(), "orders", "topic", None, None, b"v", (), None)
    headers = [(REASON, b"\xff"), (CHECK_NUMBER, b"9" * 5_000), *encode_half(half)]

    with pytest.raises(MessageFormatError, match="penstock-check-number"):
        decode_discarded(None, b"v", headers)


@given(batches, st.lists(notes, min_size=1, max_size=3), st.lists(snapshots, max_size=1), st.data())
def test_a_record_cut_or_lengthened_anywhere_is_refused(
    batch: list[Op], written: list[Note], snapshotted: list[Snapshot], data: st.DataObject
) -> None:
    records: list[tuple[bytes, Callable[[bytes], object]]] = [
        (encode_ops(batch), decode_ops),
        (encode_done(written, snapshotted), decode_done),
    ]
    for value, decode in records:
        cut = data.draw(st.integers(0, len(value) - 1))
        for wrong in (value[:cut], value + b"\x00"):
            try:
                decode(wrong)
            except MessageFormatError:
                continue
            raise AssertionError(f"{decode} took a record of {len(wrong)} bytes for one of {len(value)}")


def test_ids_are_uuids_of_version_7_that_sort_by_time_and_do_not_repeat() -> None:
    made = [new_id() for _ in range(10_000)]

    assert all(map(is_id, made))
    assert len(set(made)) == len(made)
    assert all(before[:13] <= after[:13] for before, after in pairwise(made))


def test_a_forked_process_makes_other_ids() -> None:
    program = (
        "import os; from penstock.transactions.wire.ids import new_id; new_id(); child = os.fork();"
        "print(''.join(new_id()[14:] + '\\n' for _ in range(5)), flush=True, end='');"
        "child and os.waitpid(child, 0)"
    )

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    tails = done.stdout.split()
    assert len(tails) == len(set(tails)) == 10
