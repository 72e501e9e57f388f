"""What is told of a partition that waits for an open transaction, on a clock moved by hand."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import pytest

from penstock.errors import SourceError
from penstock.spark_sink.source.offsets.planning import Offsets, TopicPartition
from penstock.spark_sink.source.planning.open_transactions import REPEAT_S, STALLED_S, OpenTransactions

STILL, IDLE, MOVING = ("orders", 0), ("orders", 1), ("orders", 2)


class FixedLogs:
    """Logs that end where a test says; it counts the questions."""

    def __init__(self, ends: Offsets) -> None:
        self.ends = ends
        self.asked: list[list[TopicPartition]] = []
        self.looked_up: list[list[TopicPartition]] = []
        self.broken = False

    def written(self, partitions: Iterable[TopicPartition]) -> Offsets:
        if self.broken:
            raise SourceError("no leader")
        self.asked.append(sorted(partitions))
        return {part: self.ends[part] for part in self.asked[-1]}

    def timestamps_ms(self, offsets: Offsets) -> dict[TopicPartition, int]:
        self.looked_up.append(sorted(offsets))
        return {STILL: 1_700_000_000_000} if STILL in offsets else {}


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_only_a_log_that_stands_still_with_something_behind_is_named_and_not_again_at_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock, logs = Clock(), FixedLogs({STILL: 120, IDLE: 7, MOVING: 900})
    transactions = OpenTransactions(logs, clock)

    with caplog.at_level(logging.WARNING, "penstock.spark_sink"):
        for second in range(int(STALLED_S + REPEAT_S) + 2):
            clock.now = float(second)
            transactions.watch({STILL: 3, IDLE: 7, MOVING: second})

    assert logs.asked == [[STILL, IDLE]] * 2
    assert logs.looked_up == [[STILL]] * 2
    assert len(caplog.messages) == 2
    assert "orders[0] waits at offset 3: a transaction is open there" in caplog.messages[0]
    assert "first message is of 2023-11-14 22:13:20 UTC; 117 offsets wait behind it" in caplog.messages[0]
    assert "--topic orders --partition 0" in caplog.messages[0]


def test_many_partitions_that_wait_cost_one_look_and_one_line(caplog: pytest.LogCaptureFixture) -> None:
    clock = Clock()
    stable = {("orders", number): 3 for number in range(100)}
    logs = FixedLogs(dict.fromkeys(stable, 120))
    transactions = OpenTransactions(logs, clock)

    with caplog.at_level(logging.WARNING, "penstock.spark_sink"):
        for second in range(int(STALLED_S) + 30):
            clock.now = float(second)
            # They come to a stand one after another.
            transactions.watch({part: 3 if second > part[1] else 2 for part in stable})

    assert len(logs.looked_up) == len(caplog.messages) == 1
    assert len(logs.looked_up[0]) <= 5
    clock.now += REPEAT_S
    with caplog.at_level(logging.WARNING, "penstock.spark_sink"):
        transactions.watch(stable)
        transactions.warn(stable)
    assert "; so do orders[1] at offset 3, orders[2] at offset 3" in caplog.messages[-1]
    assert caplog.messages[-1].count("orders[") == 5
    assert "and 95 more." in caplog.messages[-1]


def test_a_broker_that_does_not_answer_costs_the_query_nothing(caplog: pytest.LogCaptureFixture) -> None:
    logs = FixedLogs({STILL: 120})
    logs.broken = True

    with caplog.at_level(logging.WARNING, "penstock.spark_sink"):
        OpenTransactions(logs).warn({STILL: 3})

    assert not caplog.messages
