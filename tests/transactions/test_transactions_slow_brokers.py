"""Slow brokers get time: no transaction is blamed, and nothing is done twice."""

from __future__ import annotations

from pathlib import Path

import pytest
from transaction_tools import Bench

from kafka_proxy import ADD_OFFSETS, ADD_PARTITIONS, END_TXN, PRODUCE, TXN_OFFSET_COMMIT, KafkaProxy
from penstock.transactions import Coordinator, SqlStore, TransactionalProducer

#: Each longer than what a topic, or a group, is given on brokers that are well.
LATE = {PRODUCE: 2.6, TXN_OFFSET_COMMIT: 3.0, ADD_OFFSETS: 0.7, ADD_PARTITIONS: 0.7, END_TXN: 2.0}


@pytest.mark.thorough
@pytest.mark.parametrize("store", ["kafka", "sqlite"])
def test_what_slow_brokers_take_late_is_published_once_and_no_topic_is_blamed(
    bench: Bench, proxy: KafkaProxy, tmp_path: Path, caplog: pytest.LogCaptureFixture, store: str
) -> None:
    settings = {"bootstrap_servers": proxy.bootstrap_servers, "prefix": bench.topics.prefix}
    if store == "kafka":
        producer, coordinator = bench.producer(), bench.coordinator(**settings)
    else:
        stores = [SqlStore(f"sqlite:///{tmp_path / 'store.db'}", **settings) for _ in range(2)]
        producer = TransactionalProducer("orders", store=stores[0]).start()
        coordinator = Coordinator(store=stores[1]).start()
    proxy.late.update(LATE)
    pledges = [producer.submit(bench.topic, key=b"%d" % (n % 5), value=b"%d" % n) for n in range(200)]
    for pledge in pledges:
        pledge.result(60)

    bench.settled(coordinator, 120, committed=200, partitions=1)

    proxy.late.clear()
    producer.stop()
    coordinator.stop()
    assert sorted(int(value or b"") for _, value in bench.visible()) == list(range(200))
    assert [line for line in caplog.messages if "tried separately" in line or "the next trial" in line] == []
