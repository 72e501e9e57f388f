"""What `explain` names along with the message itself: a topic that is gone, an open transaction, no partition."""

from __future__ import annotations

import pytest
from confluent_kafka import KafkaError, KafkaException

from penstock.clients.topics import TopicIds
from penstock.consumer import Explanation, LitePushConsumer, handler
from penstock.consumer.poll.explain import no_partition
from penstock.consumer.poll.topics import Topics
from penstock.testing import TestApp, TestBroker
from support.consumers import app_of


def of_topic(test: TestApp, topic: str) -> Explanation:
    return next(explanation for explanation in test.explain() if explanation.topic == topic)


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (TopicIds({}, frozenset({"t", "lost"}), {"t": "no such topic"}), "the topic does not exist"),
        (TopicIds({}, frozenset(), {"t": "timed out"}), "brokers do not report the topic: timed out"),
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
        monkeypatch.setattr(Topics, "_compare", _compare_with(answer))
        test.advance(30)

        said = of_topic(test, "t")

        assert (before.lag, before.trouble) == (0, None)
        assert (said.lag, said.trouble) == (None, says)
        assert [each.topic for each in test.explain() if says in str(each)] == sorted({"t", *answer.absent})


def _compare_with(answer: TopicIds) -> object:
    compare = Topics._compare
    return lambda self, _found: compare(self, answer)


def test_a_member_without_partitions_says_what_that_may_be(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "penstock.consumer")
    broker = TestBroker()
    broker.create_topic("t")
    consumer = LitePushConsumer("g", {"t": handler(lambda _: None)}, bootstrap_servers="memory:0", cluster=broker)
    holder = broker.consumer({"group.id": "g"})
    holder.subscribe(["t"])
    holder.consume(1, 0)
    loop = consumer._loop
    loop.connect(broker)
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


class Unanswered:
    """A question that brokers do not answer."""

    def answer(self) -> None:
        raise KafkaException(KafkaError(KafkaError._TRANSPORT))


@pytest.mark.parametrize("is_new", [True, False])
def test_a_partition_that_stands_before_an_open_transaction_says_so_until_it_moves(is_new: bool) -> None:
    app = app_of()
    app.handler("orders", "others")(lambda _: None)

    with TestApp(app) as test:
        # The position of a partition is unknown until something was read.
        if not is_new:
            for _ in range(7):
                test.send("orders", "x")
        test.advance(5)
        transaction = test.broker.transaction()
        transaction.produce("orders", b"held")
        test.send("others", "passes")
        test.advance(20)
        during = {explanation.topic: explanation.trouble or "" for explanation in test.explain()}
        transaction.commit()
        test.advance(5)
        after = {explanation.topic: explanation.trouble for explanation in test.explain()}

    offset = 0 if is_new else 7
    assert f"is open at offset {offset}" in during["orders"]
    assert "--topic orders --partition 0" in during["orders"]
    assert during["others"] == ""
    assert after == {"orders": None, "others": None}


@pytest.mark.parametrize("why", ["paused", "uncommitted", "not answered"])
def test_what_does_not_wait_for_the_transaction_says_nothing_of_it(why: str, monkeypatch: pytest.MonkeyPatch) -> None:
    app = app_of(config={"isolation.level": "read_uncommitted"} if why == "uncommitted" else {})
    app.handler("orders")(lambda _: None)
    if why == "not answered":
        monkeypatch.setattr(TestBroker, "ask_readable_ends", lambda *_: Unanswered())

    with TestApp(app) as test:
        test.send("orders", "x")
        test.advance(5)
        if why == "paused":
            test.pause("orders")
        test.broker.transaction().produce("orders", b"held")
        test.advance(20)

        assert [explanation.trouble for explanation in test.explain()] == [None]
