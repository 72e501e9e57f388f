"""The published rows of a task, without Spark and Kafka: which rows, their order, and the rest after a replay."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
from handler_rows import ONCE, Row, failing, publish_task, quickly, run_task

from penstock import Outgoing
from penstock.consumer import DeadLetterLimit, handler
from penstock.consumer.handlers.handler import Handler
from penstock.errors import SinkError
from penstock.message import Message
from penstock.spark_sink.sinks.handlers.sink import HandlerSink
from penstock.spark_sink.sinks.kafka_publisher import Row as Published


def shown(rows: Sequence[Published]) -> list[tuple[int, str | None, bytes | None]]:
    """Return offset, target and value of rows."""
    return [(row.offset, row.target_topic, row.value) for row in rows]


def two(message: Message) -> Iterator[Outgoing]:
    yield Outgoing("b", f"{message.offset}", key="k", headers={"h": "1", "none": None}, partition=3)
    yield Outgoing("a", None)


async def two_async(message: Message) -> list[Outgoing]:
    # Those behind it end first.
    await asyncio.sleep(0.01 if message.offset == 0 else 0)
    return list(two(message))


@pytest.mark.parametrize("function", [two, two_async])
def test_results_stand_in_the_order_of_their_messages_and_then_as_they_were_returned(
    function: Callable[..., Any],
) -> None:
    rows, report = publish_task([Row(b"x", 0), Row(b"y", 1)], {"orders": handler(function)})

    assert shown(rows) == [
        *((0, "b", b"0"), (0, "a", None)),
        *((1, "b", b"1"), (1, "a", None)),
    ]
    first = rows[0]
    assert (first.source, first.key, first.target_partition) == (("orders", 0), b"k", 3)
    assert first.headers == [("h", b"1"), ("none", None)]
    assert rows[1].target_partition == -1
    assert (report.handled, report.results) == (2, 4)


def test_what_cannot_be_a_message_is_not_tried_again_and_dead_letters_are_published_with_the_results() -> None:
    tried: list[int] = []

    def work(message: Message) -> object:
        tried.append(message.offset)
        if message.offset == 2:
            failing(message)
        return Outgoing("a", object() if message.offset == 0 else b"fine")

    one = handler(work, retry=quickly(2), on_failure="dead_letter")
    given = [Row(b"x", 0, value=b"body"), Row(b"x", 1), Row(b"a", 2, headers=[("trace", b"1")])]
    rows, report = publish_task(given, {"orders": one})

    assert sorted(tried) == [0, 1, 2, 2]
    first, _, second = rows
    assert (first.target_topic, first.offset, first.key, first.value) == ("dlq.orders", 0, b"x", b"body")
    headers = dict(second.headers)
    places = [headers[f"__dlq.errors.{name}"] for name in ("topic", "partition", "offset", "group", "delivery.count")]
    assert places == [b"orders", b"0", b"2", b"billing", b"2"]
    assert (headers["trace"], headers["__dlq.errors.message"]) == (b"1", b"no use for 2")
    assert headers["penstock-exception-class"] == b"builtins.ValueError"
    assert (report.handled, report.dead_letters, report.results) == (1, 2, 1)


def test_what_a_handler_raised_is_named_by_its_kind_and_place_without_its_text() -> None:
    with pytest.raises(SinkError, match=r"last with ValueError \(handler_rows.py line \d+, failing\)") as caught:
        run_task([Row(b"a", 5)], {"orders": handler(failing, retry=ONCE)})

    # What Spark writes down: the error with all that is chained to it and shown.
    assert "no use for 5" not in "".join(traceback.format_exception(caught.value))


def test_a_task_that_loses_everything_is_stopped_by_the_limit() -> None:
    rows = [Row(b"k%d" % n, n) for n in range(9)]

    with pytest.raises(SinkError, match=r"3 messages were given up in a row .* orders:0@3 is not given up"):
        publish_task(
            rows,
            {"orders": handler(failing, retry=ONCE, on_failure="dead_letter")},
            dead_letter_limit=DeadLetterLimit(consecutive=3),
        )


def test_results_for_a_batch_as_a_whole_are_refused() -> None:
    one = handler(lambda messages: Outgoing("a", f"{len(messages)}"), batch=2)

    with pytest.raises(SinkError, match=r"for its batch as a whole.*return a list with the results of each message"):
        publish_task([Row(b"k%d" % n, n, partition=n % 2) for n in range(4)], {"orders": one})


def test_a_sink_without_a_name_refuses_what_handlers_return() -> None:
    with pytest.raises(SinkError, match=r"two returned messages.*give it name="):
        run_task([Row(b"x", 0)], {"orders": handler(two)})


def sink_of(one: Handler, **options: Any) -> HandlerSink:
    return HandlerSink({"orders": one}, **{"group": "billing", "parallelism": 2, **options})


def test_a_sink_with_a_name_has_a_ledger_and_its_results_go_where_an_apps_would() -> None:
    config = {"isolation.level": "read_committed", "group.id": "app", "error_cb": print, "sasl.password": "canary"}
    config |= {"oauth_cb": "tokens:token"}  # which can travel
    sink = sink_of(handler(two), name="invoices", bootstrap_servers="there:1", config=config)

    assert sink.has_ledger
    assert not sink_of(handler(two)).has_ledger
    target = sink._target()
    assert target is not None
    # The client library's, as for the keys of an app; a `KafkaSink` has Java's.
    assert target.config == {
        "partitioner": "consistent_random", "compression.type": "zstd", "sasl.password": "canary",
        "oauth_cb": "tokens:token",
    }  # fmt: skip
    assert "canary" not in repr(sink)
    assert "canary" not in repr(target)
