"""Rows of the source's columns: the lane of each."""

from __future__ import annotations

import pyarrow as pa
import pytest
from handler_rows import Row, batches_of

from penstock.consumer.handlers.options.ordering import Keyless, Order, Ordering
from penstock.errors import SinkError
from penstock.spark_sink.sinks.handlers.execution.rows import lane_numbers


def columns_of(rows: list[Row]) -> dict[str, pa.Array]:
    (batch,) = batches_of(rows, size=len(rows))
    return {name: batch.column(name) for name in batch.schema.names}


def test_rows_of_a_key_share_a_lane_whatever_topic_they_come_from_and_keyless_ones_that_of_their_partition() -> None:
    ordering = Ordering(Order.KEY, Keyless.PARTITION, 512)
    rows = [
        *(Row(b"a", 0), Row(None, 1), Row(b"b", 2), Row(None, 3)),
        *(Row(None, 4, partition=1), Row(b"a", 5, "payments"), Row(None, 6, "payments")),
    ]

    lanes = lane_numbers({"orders": ordering, "payments": ordering}, columns_of(rows)).to_pylist()

    assert lanes[0] == lanes[5]
    assert lanes[1] == lanes[3]
    assert len({lanes[0], lanes[1], lanes[2], lanes[4], lanes[6]}) == 5


def test_the_lane_of_a_key_by_header_is_that_of_the_header() -> None:
    ordering = Ordering(Order.KEY, Keyless.PARTITION, 512, lambda message: message.header("account"))
    rows = [Row(b"%d" % n, n, headers=[("account", b"one" if n % 2 else b"two")]) for n in range(6)]

    lanes = lane_numbers({"orders": ordering}, columns_of(rows)).to_pylist()

    assert len(set(lanes[::2])) == len(set(lanes[1::2])) == 1
    assert lanes[0] != lanes[1]


def test_rows_without_a_place_or_a_handler_are_refused_with_a_sentence() -> None:
    ordering = Ordering(Order.KEY, Keyless.PARTITION, 8)
    columns = columns_of([Row(b"a", 0), Row(b"a", 1)])

    with pytest.raises(SinkError, match="rows of topic orders, which has no handler in this sink"):
        lane_numbers({"payments": ordering}, columns)
    with pytest.raises(SinkError, match="column offset of the frame for handlers is NULL in 1 rows"):
        lane_numbers({"orders": ordering}, {**columns, "offset": pa.array([1, None], pa.int64())})
