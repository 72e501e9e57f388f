"""Formats: what is written reads back, and garbage is refused with one kind of error (I10)."""

from __future__ import annotations

import contextlib
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import MessageFormatError
from penstock.transactions.ids import is_id, new_id
from penstock.transactions.records import (
    RESERVED_PREFIX,
    Author,
    CheckRequest,
    Half,
    Note,
    Op,
    Verdict,
    decode_check_request,
    decode_done,
    decode_half,
    decode_op,
    encode_check_request,
    encode_discarded,
    encode_done,
    encode_half,
    encode_op,
)

ids = st.builds(new_id)
offsets = st.integers(0, (1 << 63) - 1)
partitions = st.integers(0, (1 << 31) - 1)
numbers = st.integers(0, (1 << 16) - 1)
bodies = st.none() | st.binary(max_size=50)
groups = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=30)
names = st.text(st.characters(exclude_categories=["Cs"]), max_size=20).filter(
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
)
notes = st.builds(
    Note,
    transaction_id=ids,
    half_offset=offsets,
    verdict=st.sampled_from(Verdict),
    check_count=numbers,
    answered_ms=offsets,
)
fields = st.sampled_from(
    ["tx", "group", "topic", "partition", "check-immunity-ms", "half-partition", "half-offset", "check-number", "x"]
).map(lambda name: RESERVED_PREFIX + name)
garbage_headers = st.lists(st.tuples(names | fields, bodies), max_size=8)


@given(halves)
def test_a_half_reads_back_as_it_was_written(half: Half) -> None:
    assert decode_half(half.key, half.value, encode_half(half)) == half


@given(halves, partitions, offsets, numbers)
def test_a_check_request_reads_back_as_it_was_written(half: Half, partition: int, offset: int, number: int) -> None:
    request = CheckRequest(half, partition, offset, number)

    assert decode_check_request(half.key, half.value, encode_check_request(request)) == request


@given(ops)
def test_an_op_reads_back_as_it_was_written(op: Op) -> None:
    assert decode_op(encode_op(op)) == op


@given(st.lists(notes, max_size=5))
def test_a_done_record_reads_back_as_it_was_written(written: list[Note]) -> None:
    assert decode_done(encode_done(written)) == written


@given(halves, numbers)
def test_a_discarded_record_holds_all_of_the_half(half: Half, checks: int) -> None:
    headers = encode_discarded(half, "checks exhausted", checks)

    assert set(encode_half(half)) <= set(headers)


@given(bodies, bodies, garbage_headers)
def test_garbage_headers_raise_nothing_but_a_format_error(
    key: bytes | None, value: bytes | None, headers: list[tuple[str, bytes | None]]
) -> None:
    with contextlib.suppress(MessageFormatError):
        decode_half(key, value, headers)
    with contextlib.suppress(MessageFormatError):
        decode_check_request(key, value, headers)


@given(st.none() | st.binary(max_size=200))
def test_garbage_bytes_raise_nothing_but_a_format_error(value: bytes | None) -> None:
    with contextlib.suppress(MessageFormatError):
        decode_op(value)
    with contextlib.suppress(MessageFormatError):
        decode_done(value)


@given(ops, st.lists(notes, min_size=1, max_size=3), st.data())
def test_a_record_cut_or_lengthened_anywhere_is_refused(op: Op, written: list[Note], data: st.DataObject) -> None:
    for value, decode in ((encode_op(op), decode_op), (encode_done(written), decode_done)):
        cut = data.draw(st.integers(0, len(value) - 1))
        for wrong in (value[:cut], value + b"\x00"):
            try:
                decode(wrong)
            except MessageFormatError:
                continue
            raise AssertionError(f"{decode.__name__} took a record of {len(wrong)} bytes for one of {len(value)}")


@given(ops, st.data())
def test_a_flipped_bit_of_an_op_is_refused_or_reads_as_another_op(op: Op, data: st.DataObject) -> None:
    value = bytearray(encode_op(op))
    bit = data.draw(st.integers(0, len(value) * 8 - 1))
    value[bit // 8] ^= 1 << bit % 8

    try:
        read = decode_op(bytes(value))
    except MessageFormatError:
        return
    assert read != op


def test_ids_are_uuids_of_version_7_that_sort_by_time_and_do_not_repeat() -> None:
    made = [new_id() for _ in range(10_000)]

    assert all(map(is_id, made))
    assert len(set(made)) == len(made)
    assert all(before[:13] <= after[:13] for before, after in pairwise(made))
