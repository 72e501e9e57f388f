"""Ends in doubt and restarts of a coordinator: nothing lost, nothing twice, and logs that do not grow."""

from __future__ import annotations

from collections import Counter

import pytest
from transaction_tools import Bench

from penstock.transactions.publishing.publisher import InDoubtError, Publisher
from waiting import wait_until


@pytest.fixture
def doubtful_ends(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Every third end of a Kafka transaction is in doubt: it was committed, or it was not sent at all."""
    commit, ends = Publisher._commit, []

    def in_doubt(self: Publisher) -> None:
        ends.append("known")
        if len(ends) % 3 == 0:
            ends[-1] = "committed" if len(ends) % 2 else "lost"
            if ends[-1] == "committed":
                commit(self)
            raise InDoubtError("the answer was lost")
        commit(self)

    monkeypatch.setattr(Publisher, "_commit", in_doubt)
    return ends


def test_an_end_in_doubt_is_settled_from_the_done_log(
    bench: Bench, doubtful_ends: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The logs are looked at in each round, that of a doubt, too: it once hid its notes.
    monkeypatch.setattr("penstock.transactions.stores.kafka.coordinator.log_upkeep.UPKEEP_S", 0.0)
    coordinator, producer = bench.coordinator(), bench.producer()

    for number in range(12):
        # One by one, so that there are many Kafka transactions to end.
        producer.send(bench.topic, key=b"%d" % (number % 5), value=b"%d" % number)
        statistics = bench.settled(coordinator, committed=number + 1)

    assert {"committed", "lost"} <= set(doubtful_ends)
    assert statistics.recoveries >= 2
    assert Counter(value for _, value in bench.visible()) == Counter(b"%d" % number for number in range(12))


def test_a_restart_reads_on_from_the_checkpoints_and_the_logs_do_not_grow(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.transactions.stores.kafka.coordinator.log_upkeep.UPKEEP_S", 0.2)
    first, producer = bench.coordinator(), bench.producer()
    for number in range(50):
        producer.send(bench.topic, key=b"%d" % number, value=b"%d" % number)
    bench.settled(first, committed=50)
    wait_until(lambda: not bench.messages(bench.topics.half) and not bench.messages(bench.topics.op))
    first.stop()

    second = bench.coordinator()
    producer.send(bench.topic, value=b"last")
    statistics = bench.settled(second, committed=1)

    assert (statistics.committed, statistics.refused) == (1, 0)
    assert len(bench.visible()) == 51
    wait_until(lambda: len(bench.messages(bench.topics.done)) <= bench.topics.partitions)
