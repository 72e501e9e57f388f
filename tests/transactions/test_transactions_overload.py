"""A coordinator with more work than it can publish: it works at its own speed, and the backlog waits in Kafka."""

from __future__ import annotations

import time
from collections import deque

import pytest
from transaction_tools import Bench

from penstock.transactions import Submission
from waiting import wait_until

pytestmark = pytest.mark.thorough

#: More than the coordinator holds of them at a time, by far: what waits in it is a few groups and 500 ms of halves.
BACKLOG = 40_000
HELD = 25_000


def test_a_backlog_waits_in_the_logs_and_not_in_the_memory(bench: Bench) -> None:
    producer = bench.producer(max_in_flight=2_000)
    sent = [producer.submit(bench.topic, key=b"%d" % (number % 1_000), value=b"v") for number in range(BACKLOG)]
    for future in sent:
        future.result(60)

    coordinator = bench.coordinator(transaction_timeout=600)
    held = [0]

    def is_done() -> bool:
        now = coordinator.statistics()
        held.append(now.pending)
        return now.committed == BACKLOG

    wait_until(is_done, timeout=120)

    assert len(held) > 10, "it was looked at while it worked"
    assert max(held) <= HELD
    assert len(bench.visible()) == BACKLOG


def test_a_producer_that_outruns_the_coordinator_is_paced_by_it(bench: Bench) -> None:
    coordinator, producer = bench.coordinator(transaction_timeout=600), bench.producer()
    pace = producer._core.store._watch.pace  # type: ignore[attr-defined] # the store is Kafka's
    futures, sent, held, deadline = deque[Submission](), 0, 0, time.monotonic() + 120

    while not held and time.monotonic() < deadline:
        futures.append(producer.submit(bench.topic, key=b"%d" % (sent % 1_000), value=b"v"))
        sent += 1
        held = len(pace._held)
        if len(futures) >= 64:
            futures.popleft().result(60)
    for future in futures:
        future.result(60)
    bench.settled(coordinator, committed=sent)

    assert held, "an answer waited for the publication"
    assert not pace._held
    assert len(bench.visible()) == sent
