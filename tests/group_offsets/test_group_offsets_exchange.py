from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from positions_drawn import positions

from penstock.errors import ConfigurationError
from penstock.group_offsets.exchange import Export, from_json, require_same_topics, to_json
from penstock.group_offsets.planning import Wanted, plan
from penstock.group_offsets.positions import Position
from penstock.offsets import decode, owner_of

SEVERAL = st.tuples(positions(0), positions(1), positions(2))


@given(SEVERAL)
def test_what_is_written_is_read_back(before: tuple[Position, ...]) -> None:
    text = to_json("sms", before, {"orders": "id-1"}, 1_769_846_400.7)

    read = from_json(text)

    assert read == Export(
        "sms",
        {"orders": "id-1"},
        {one.part: Wanted(one.committed, one.done) for one in before if one.committed is not None},
    )
    assert json.loads(text)["exported"] == "2026-01-31T08:00:00+00:00"


@given(positions())
def test_another_group_that_takes_a_file_has_done_the_same(before: Position) -> None:
    if before.committed is None or before.is_before_the_start:
        return
    read = from_json(to_json("sms", [before], {}, 0))

    [change] = plan("copy", [Position(*before.part, None, before.log)], read.wanted)

    found = decode(change.offset, change.metadata, owner_of("copy", *before.part))
    assert change.offset == before.committed
    assert (found.done if found else ()) == before.done
    assert decode(change.offset, change.metadata, owner_of("sms", *before.part)) is None


def test_a_file_is_readable_a_line_for_each_partition() -> None:
    before = [Position("orders", number, 120, range(200), (range(125, 132), range(140, 141))) for number in range(2)]

    lines = to_json("sms", before, {"orders": "id-1"}, 0).splitlines()

    assert '    {"topic": "orders", "partition": 1, "offset": 120, "done": [[125, 131], [140, 140]]}' in lines


def row(**changes: Any) -> dict[str, Any]:
    return {"topic": "orders", "partition": 0, "offset": 120, "done": [[125, 131]], **changes}


def file(*rows: object, **changes: Any) -> str:
    head = {"format": "penstock-offsets", "version": 1, "group": "sms", "topic_ids": {}, "partitions": list(rows)}
    return json.dumps({**head, **changes})


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("no JSON", "no JSON"),
        ("[" * 100_000, "no JSON"),
        ("[]", '"format"'),
        ("{}", '"format"'),
        (file(version=2), "version 2"),
        (file(version=None), "version None"),
        (file(group=None), '"group"'),
        (file(partitions={}), '"partitions"'),
        (file(topic_ids=[]), '"topic_ids"'),
        (file(row(), 7), "row 2"),
        (file(row(topic=None)), "row 1"),
        (file(row(partition=-1)), "row 1"),
        (file(row(partition="0")), "row 1"),
        (file(row(offset=True)), "row 1"),
        (file(row(offset=2**63)), "row 1"),
        (file(row(offset=1.5)), "row 1"),
        (file(row(), row()), r"orders\[0\] stands twice"),
        (file(row(done=7)), r'"done" of orders\[0\] must be a list'),
        (file(row(done=[[125]])), "must be a list"),
        (file(row(done=[[125, "131"]])), "must be a list"),
        (file(row(done=[[120, 131]])), "above offset 120"),
        (file(row(done=[[131, 125]])), "must have ranges that rise"),
        (file(row(done=[[125, 131], [131, 140]])), "must have ranges that rise"),
    ],
)
def test_a_file_that_is_none_is_refused_with_the_place(text: str, says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        from_json(text)


def test_a_topic_that_was_made_anew_is_refused() -> None:
    given_ids = Export("sms", {"orders": "id-1", "payments": "id-2"}, {})

    require_same_topics(given_ids, {"orders": "id-1"})
    require_same_topics(Export("sms", {}, {}), {"orders": "id-9"})
    with pytest.raises(ConfigurationError, match="topic orders is not the one of the file"):
        require_same_topics(given_ids, {"orders": "id-9", "payments": "id-2"})
