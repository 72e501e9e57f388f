"""A task without Spark: what surrounds handlers, and the two kinds of them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from handler_rows import ONCE, Row, batches_of, quickly, run_task

from penstock.consumer import CallNext, WorkerResource, handler
from penstock.consumer.handlers.ordering import Keyless, Order, Ordering
from penstock.errors import SinkError
from penstock.message import Message
from penstock.spark_sink.sinks.handlers.rows import lanes_by_keys


def test_a_row_is_a_message_with_all_that_the_source_tells_of_it() -> None:
    seen: list[tuple[Any, ...]] = []

    def look(message: Message) -> None:
        seen.append((message.topic, message.partition, message.offset, message.key, message.value))
        seen.append((message.timestamp, message.headers, message.header("a")))

    run_task(
        [Row(None, 7, partition=3, value=None, headers=[("a", b"1"), ("a", b"2")]), Row(b"k", 8)],
        {"orders": handler(look)},
    )

    assert seen[:2] == [("orders", 3, 7, None, None), (1_700_000_000_123, (("a", b"1"), ("a", b"2")), b"2")]
    assert seen[3] == (1_700_000_000_123, (), None)


def test_a_task_reports_what_became_of_its_rows() -> None:
    rows = [Row(b"k%d" % n, n, lane=n) for n in range(8)]
    failing = {0: 1, 1: 9}

    def work(message: Message) -> None:
        if failing.get(message.offset, 0):
            failing[message.offset] -= 1
            raise RuntimeError("no")

    report = run_task(
        rows,
        {"orders": handler(work, retry=quickly(2), on_failure="drop", filter=lambda message: message.offset != 7)},
    )

    assert (report.rows, report.handled, report.dropped, report.filtered, report.dead_letters) == (8, 6, 1, 1, 0)
    assert (report.failed, report.retried) == (3, 2)


def test_lifespans_resources_and_middlewares_surround_a_task_and_end_in_reverse_order() -> None:
    log: list[str] = []

    def first() -> Iterator[None]:
        log.append("first begins")
        yield
        log.append("first ends")

    def second() -> Iterator[None]:
        log.append("second begins")
        yield
        log.append("second ends")

    def session() -> Iterator[str]:
        log.append("session opens")
        yield "session"
        log.append("session closes")

    resource = WorkerResource(session)  # type: ignore[arg-type] # a generator function, as the decorator takes it

    def work(message: Message) -> None:
        log.append(resource.get())

    def around(message: Message, call_next: CallNext) -> None:
        log.append(f"before {message.offset}")
        call_next(message)
        log.append(f"after {message.offset}")

    run_task(
        [Row(b"a", 0), Row(b"b", 1)],
        {"orders": handler(work)},
        lifespans=(first, second),
        resources=(resource,),
        middlewares=(around,),
    )

    assert log == [
        *("first begins", "second begins", "before 0", "session opens", "session", "after 0"),
        *("before 1", "session", "after 1", "session closes", "second ends", "first ends"),
    ]


def test_an_async_handler_that_fails_for_good_ends_what_is_under_way_and_what_surrounds_the_task() -> None:
    ended: list[object] = []

    def span() -> Iterator[None]:
        yield
        ended.append("lifespan")

    async def work(message: Message) -> None:
        if message.offset == 1:
            raise RuntimeError("no")
        try:
            await asyncio.sleep(600)
        except asyncio.CancelledError:
            ended.append(message.offset)
            raise

    rows = [Row(b"a", 0), Row(b"b", 1)]
    with pytest.raises(SinkError, match=r"failed orders:0@1"):
        run_task(rows, {"orders": handler(work, retry=ONCE)}, lifespans=(span,))

    assert ended == [0, "lifespan"]


def lanes_of(rows: list[Row], **topics: Ordering) -> list[int]:
    """Return the lanes of rows, as Spark would ask for them."""
    (batch,) = batches_of(rows, size=len(rows))
    lanes: list[int] = lanes_by_keys(topics, batch.schema.names)(*batch.columns).to_pylist()
    return lanes


def test_rows_of_a_key_share_a_lane_whatever_topic_they_come_from_and_keyless_ones_that_of_their_partition() -> None:
    ordering = Ordering(Order.KEY, Keyless.PARTITION, 512)
    rows = [
        *(Row(b"a", 0), Row(None, 1), Row(b"b", 2), Row(None, 3)),
        *(Row(None, 4, partition=1), Row(b"a", 5, "payments"), Row(None, 6, "payments")),
    ]

    lanes = lanes_of(rows, orders=ordering, payments=ordering)

    assert lanes[0] == lanes[5]
    assert lanes[1] == lanes[3]
    assert len({lanes[0], lanes[1], lanes[2], lanes[4], lanes[6]}) == 5


def test_rows_without_a_place_or_a_handler_are_refused_with_a_sentence() -> None:
    ordering = Ordering(Order.KEY, Keyless.PARTITION, 8)
    nowhere: Any = None

    with pytest.raises(SinkError, match="rows of topic orders, which has no handler in this sink"):
        lanes_of([Row(b"a", 0)], payments=ordering)
    with pytest.raises(SinkError, match="column offset of the frame for handlers is NULL in 1 rows"):
        lanes_of([Row(b"a", 0), Row(b"a", nowhere)], orders=ordering)
