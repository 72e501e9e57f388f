"""A coordinator that is sent more than it can publish: it works at its own speed, and what waits, waits in Kafka."""

from __future__ import annotations

from transaction_tools import Bench

from waiting import wait_until

#: More than the coordinator holds of them at a time, by far: what waits in it is a few groups and 500 ms of halves.
BACKLOG = 40_000
HELD = 25_000


def test_a_backlog_waits_in_the_logs_and_not_in_the_memory(bench: Bench) -> None:
    producer = bench.producer(max_in_flight=2_000)
    sent = [producer.submit(bench.topic, key=b"%d" % (number % 1_000), value=b"v") for number in range(BACKLOG)]
    for one in sent:
        one.result(60)

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
