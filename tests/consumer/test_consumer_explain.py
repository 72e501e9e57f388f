"""What `explain` names beside the message itself: a topic that is gone, and why a member has no partition."""

from __future__ import annotations

import pytest

from penstock.clients.topics import TopicIds
from penstock.consumer import Explanation, LitePushConsumer, handler
from penstock.consumer.inspect.explain import no_partition
from penstock.consumer.poll.topics import TopicWatch
from penstock.testing import TestApp, TestBroker
from support.consumers import app_of


def of_topic(test: TestApp, topic: str) -> Explanation:
    return next(one for one in test.explain() if one.topic == topic)


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
    app = app_of()
    app.handler("t")(lambda _: None)
    with TestApp(app) as test:
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
