"""What `explain` names beside the message itself: another topic's parked key, a dead letter, a topic that is gone."""

from __future__ import annotations

import pytest
import tenacity

import penstock
from penstock.clients.requests.topic_ids import TopicIds
from penstock.consumer import Explanation, LitePushConsumer, handler
from penstock.consumer.inspection.causes import no_partition
from penstock.consumer.polling.health.topic_watch import TopicWatch
from penstock.message import Message
from penstock.testing import TestApp, TestBroker
from support.consumers import app_of


def failing(*topics: str) -> penstock.App:
    """An app that fails every message of the value `poison`, and is tried again after a minute."""
    app = app_of()

    @app.handler(*topics, retry=penstock.retry(5, wait=tenacity.wait_fixed(60)))
    def handle(message: Message) -> None:
        if message.value == b"poison":
            raise ValueError

    return app


def of_topic(test: TestApp, topic: str) -> Explanation:
    return next(one for one in test.explain() if one.topic == topic)


def test_a_key_that_is_parked_in_another_topic_is_named() -> None:
    with TestApp(failing("orders", "payments")) as test:
        test.send("orders", "poison", key="k")
        test.settle()
        test.send("payments", "fine", key="k")
        test.settle()

        said = of_topic(test, "payments")

        assert (said.blocking_offset, said.state) == (0, "behind its key")
        assert "it waits for orders[0]@0 of its key" in str(said)
        test.crash()


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (TopicIds({}, frozenset({"t"}), {"t": "no such topic"}), "the topic does not exist"),
        (TopicIds({}, frozenset(), {"t": "timed out"}), "brokers do not tell of the topic: timed out"),
    ],
    ids=["gone", "no broker"],
)
def test_a_topic_that_cannot_be_had_has_no_lag_and_says_so(
    answer: TopicIds, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with TestApp(failing("t")) as test:
        test.send("t", "fine")
        test.advance(30)
        before = of_topic(test, "t")
        monkeypatch.setattr(TopicWatch, "_compare", _compare_with(answer))
        test.advance(30)

        said = of_topic(test, "t")

        assert (before.lag, before.trouble) == (0, None)
        assert (said.lag, said.trouble) == (None, says)
        assert says in str(said)


def _compare_with(answer: TopicIds) -> object:
    compare = TopicWatch._compare
    return lambda self, _found: compare(self, answer)


def test_a_member_without_partitions_says_what_that_may_be(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "penstock.consumer")
    broker = TestBroker()
    broker.create_topic("t")
    consumer = LitePushConsumer("g", {"t": handler(lambda _: None)}, bootstrap_servers="memory:0", cluster=broker)
    holder = broker.consumer({"group.id": "g"})
    holder.subscribe(["t"])
    holder.consume(1, 0)
    loop = consumer._loop = consumer._engine.connect(broker)
    loop.membership.join()
    for _ in range(8):
        loop.step()
        holder.consume(1, 0)
        broker.advance(1)

    (said,) = consumer.explain()

    assert (said.partition, said.state) == (-1, "no partition")
    assert "waits for a member that died until its session ends (session.timeout.ms=15000)" in str(said)
    assert [record.getMessage() for record in caplog.records if "no partition" in record.getMessage()] == [
        f"g: {no_partition({'session.timeout.ms': 15_000})}"
    ]
