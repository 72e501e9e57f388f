"""The offset map survives its way through Kafka's metadata, and nothing else passes for one."""

from __future__ import annotations

import base64
import time
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.offsets import MAX_METADATA_CHARS, OffsetMap, decode, encode, owner_of
from penstock.offsets.metadata import encode_flags


@st.composite
def offset_maps(draw: st.DrawFn, max_runs: int = 60) -> OffsetMap:
    base = draw(st.integers(0, 2**40))
    lengths = draw(st.lists(st.tuples(st.integers(1, 5000), st.integers(1, 5000)), min_size=1, max_size=max_runs))
    done, at = [], base
    for open_length, done_length in lengths:
        at += open_length
        done.append(range(at, at + done_length))
        at += done_length
    return OffsetMap(base, tuple(done))


@given(offset_maps())
def test_a_map_that_fits_is_read_back_as_it_was(given_map: OffsetMap) -> None:
    text = encode(given_map.base, given_map.done)

    assert decode(given_map.base, text) == given_map


@given(offset_maps(), st.data())
def test_membership_agrees_with_the_ranges(given_map: OffsetMap, data: st.DataObject) -> None:
    offset = data.draw(st.integers(given_map.base, given_map.end + 3))

    assert (offset in given_map) == any(offset in run for run in given_map.done)


def test_a_map_too_large_for_kafka_is_cut_at_its_end_and_never_invents_done_work() -> None:
    base = 1000
    # Runs of varied length, so that neither run lengths, bitmap nor deflate make it small.
    done, at = [], base
    for number in range(20_000):
        at += 1 + (number * 7919) % 113
        length = 1 + (number * 104_729) % 97
        done.append(range(at, at + length))
        at += length

    text = encode(base, done)
    read = decode(base, text)

    assert len(text) <= MAX_METADATA_CHARS
    assert read is not None
    assert read.done == tuple(done[: len(read.done)])
    assert 500 < len(read.done) < len(done)


@given(offset_maps(), st.integers(1, 1000))
def test_a_map_committed_with_another_offset_is_ignored(given_map: OffsetMap, shift: int) -> None:
    text = encode(given_map.base, given_map.done)

    assert decode(given_map.base + shift, text) is None


@pytest.mark.parametrize(
    "owner",
    [owner_of("another", "t", 0), owner_of("g", "another", 0), owner_of("g", "t", 1), b""],
    ids=["group", "topic", "partition", "nobody's"],
)
@given(given_map=offset_maps())
def test_a_map_of_another_group_topic_or_partition_is_ignored(given_map: OffsetMap, owner: bytes) -> None:
    mine = owner_of("g", "t", 0)

    text = encode(given_map.base, given_map.done, owner=mine)

    assert decode(given_map.base, text, mine) == given_map
    assert decode(given_map.base, text, owner) is None


@given(offset_maps(), st.data())
def test_a_cut_or_changed_map_is_ignored(given_map: OffsetMap, data: st.DataObject) -> None:
    text = encode(given_map.base, given_map.done)
    place = data.draw(st.integers(0, len(text) - 1))
    other = data.draw(st.sampled_from("0Ab~{r}").filter(lambda char: char != text[place]))

    assert decode(given_map.base, text[:place]) is None
    assert decode(given_map.base, text[:place] + other + text[place + 1 :]) is None


@given(st.text(max_size=300), st.integers(-5, 2**62))
def test_foreign_metadata_is_ignored_without_an_error(text: str, base: int) -> None:
    assert decode(base, text) is None
    assert decode(base, "p2R" + text) is None
    assert decode(base, None) is None


def test_a_newer_version_is_ignored() -> None:
    text = encode(5, [range(6, 9)])

    assert decode(5, text.replace("p2", "p3", 1)) is None


def test_nothing_done_above_the_commit_point_is_an_empty_string() -> None:
    assert encode(7, []) == ""


def forged(kind: str, content: bytes) -> str:
    """Return a map at 7 with a correct checksum and any content."""
    checksum = zlib.crc32(content, zlib.crc32(kind.encode(), zlib.crc32((7).to_bytes(8, "big", signed=True))))
    return f"p2{kind}{base64.b85encode(checksum.to_bytes(4, 'big') + content).decode()}"


@given(st.sampled_from("rbRB"), st.binary(max_size=2_000), st.booleans())
def test_a_forged_map_with_the_right_checksum_is_ignored_or_a_map(kind: str, content: bytes, deflated: bool) -> None:
    read = decode(7, forged(kind, zlib.compress(content) if deflated else content))

    assert read is None or (read.base == 7 and all(7 < run.start < run.stop for run in read.done))


@pytest.mark.parametrize(
    ("kind", "content"),
    [("R", b"\xff" * 1_000_000), ("R", b"\x01" * 1_000_000), ("B", b"\xaa" * 1_000_000)],
    ids=["one endless number", "half a million runs", "four million runs"],
)
def test_a_forged_map_of_a_kilobyte_that_claims_millions_is_ignored_at_once(kind: str, content: bytes) -> None:
    text = forged(kind, zlib.compress(content, 9))
    begun = time.process_time()

    assert len(text) < 2_000
    assert decode(7, text) is None
    assert time.process_time() - begun < 5


def test_a_map_of_more_runs_than_are_read_is_cut() -> None:
    flags = bytes([0, 1] * 200_000)

    read = decode(7, encode_flags(7, flags))

    assert read is not None
    assert read.done == tuple(range(at, at + 1) for at in range(8, 7 + 2 * len(read.done), 2))
