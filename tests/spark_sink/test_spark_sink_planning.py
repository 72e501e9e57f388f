from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import MessageFormatError
from penstock.spark_sink.source.plan import (
    SMALL_TASK,
    OffsetRange,
    Offsets,
    cut,
    from_json,
    limited,
    parse_offsets,
    to_json,
)

partitions = st.tuples(st.sampled_from(["a", "b"]), st.integers(0, 5))
offsets = st.dictionaries(partitions, st.integers(0, 2**62), min_size=1)
ranges = st.lists(
    st.builds(
        lambda partition, start, size: OffsetRange("a", partition, start, start + size),
        st.integers(0, 9),
        st.integers(0, 10**9),
        st.integers(0, 10**6),
    ),
    unique_by=lambda part: part.partition,
)


@given(offsets)
def test_offsets_survive_the_way_through_json(given_offsets: Offsets) -> None:
    assert from_json(to_json(given_offsets)) == given_offsets


@pytest.mark.parametrize(
    "text", ["", "[]", '{"a": 1}', '{"a": {"x": 1}}', '{"a": {"0": "1"}}', '{"a": {"0": true}}', '{"a": {"0": -3}}']
)
def test_offsets_of_another_shape_are_refused_with_a_sentence(text: str) -> None:
    with pytest.raises(MessageFormatError, match="offset"):
        parse_offsets(text)


@given(offsets, st.data(), st.integers(1, 1000))
def test_a_limit_is_used_up_but_never_passed(start: Offsets, data: st.DataObject, limit: int) -> None:
    latest = {part: offset + data.draw(st.integers(0, 500)) for part, offset in start.items()}

    ends = limited(start, latest, limit)

    taken = {part: ends[part] - start[part] for part in ends}
    assert ends.keys() == latest.keys()
    assert all(0 <= taken[part] <= latest[part] - start[part] for part in taken)
    assert sum(taken.values()) == min(limit, sum(latest.values()) - sum(start.values()))


@given(st.integers(8, 1000), st.integers(1, 10**9))
def test_a_small_partition_does_not_starve_beside_large_ones(limit: int, large: int) -> None:
    latest = {("a", 0): 1, **{("a", number): large for number in range(1, 8)}}

    ends = limited({}, latest, limit)

    assert ends["a", 0] == 1


def test_a_log_that_ends_before_the_start_is_not_read_backwards() -> None:
    ends = limited({("a", 0): 100, ("a", 1): 0}, {("a", 0): 7, ("a", 1): 50}, 10)

    assert ends == {("a", 0): 7, ("a", 1): 10}


@given(ranges, st.integers(1, 50))
def test_tasks_cover_every_offset_once(given_ranges: list[OffsetRange], least: int) -> None:
    tasks = [task for (task,) in cut(given_ranges, least)]

    whole = [part for part in given_ranges if part.size]
    assert all(task.size > 0 for task in tasks)
    for part in whole:
        mine = sorted(task for task in tasks if task.partition == part.partition)
        assert (mine[0].start, mine[-1].end) == (part.start, part.end)
        assert all(before.end == after.start for before, after in pairwise(mine))
    assert len(tasks) >= min(least, sum(part.size for part in whole))


@given(ranges)
def test_small_ranges_share_tasks_and_no_offset_is_left_out(given_ranges: list[OffsetRange]) -> None:
    tasks = cut(given_ranges)

    assert [part for task in tasks for part in task] == [part for part in given_ranges if part.size]
    assert all(len(task) == 1 or sum(part.size for part in task) <= SMALL_TASK for task in tasks)
    assert all(sum(part.size for part in [*before, after[0]]) > SMALL_TASK for before, after in pairwise(tasks))
