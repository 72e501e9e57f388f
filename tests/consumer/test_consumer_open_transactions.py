"""An open transaction of somebody else holds a partition: that is told, and only then."""

from __future__ import annotations

import pytest
from confluent_kafka import KafkaError, KafkaException

from penstock.testing import TestApp, TestBroker
from support.consumers import app_of


class Unanswered:
    """A question that brokers do not answer."""

    def answer(self) -> None:
        raise KafkaException(KafkaError(KafkaError._TRANSPORT))


@pytest.mark.parametrize("is_new", [True, False])
def test_a_partition_that_stands_before_an_open_transaction_says_so_until_it_moves(is_new: bool) -> None:
    app = app_of()
    app.handler("orders", "others")(lambda _: None)

    with TestApp(app) as test:
        # Of a partition of which nothing was ever read, no position is known.
        if not is_new:
            for _ in range(7):
                test.send("orders", "x")
        test.advance(5)
        transaction = test.broker.transaction()
        transaction.produce("orders", b"held")
        test.send("others", "passes")
        test.advance(20)
        during = {one.topic: one.trouble or "" for one in test.explain()}
        transaction.commit()
        test.advance(5)
        after = {one.topic: one.trouble for one in test.explain()}

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

        assert [one.trouble for one in test.explain()] == [None]
