"""Topics and partitions that the app itself pauses."""

from __future__ import annotations

import pytest

import penstock
from penstock.errors import ConfigurationError
from penstock.testing import TestApp


def app_of(seen: list[bytes | None]) -> penstock.App:
    app = penstock.App("app", bootstrap_servers="memory:0")
    app.handler("t", "u")(lambda message: seen.append(message.value))
    return app


def test_a_paused_topic_is_not_fetched_and_another_goes_on_until_it_is_resumed() -> None:
    seen: list[bytes | None] = []

    with TestApp(app_of(seen)) as test:
        test.settle()
        test.pause("t")
        test.settle()
        test.send("t", "1")
        test.send("u", "2")
        test.advance(10)
        while_paused, said = list(seen), next(str(one) for one in test.explain() if one.topic == "t")
        test.resume("t")
        test.settle()
        pauses = test.statistics().pauses["by the app"]

    assert (while_paused, seen, pauses) == ([b"2"], [b"2", b"1"], 1)
    assert "paused (by the app since " in said
    assert "running.resume('t') lets it go on" in said


def test_a_pause_survives_a_rebalance_and_a_partition_can_be_resumed_alone() -> None:
    seen: list[bytes | None] = []

    with TestApp(app_of(seen), partitions=2) as test:
        test.pause("t")
        test.settle()
        test.broker.rebalance("app")
        test.settle()
        for partition in (0, 1):
            test.send("t", str(partition), partition=partition)
        test.settle()
        paused = list(seen)
        test.resume("t", 1)
        test.settle()

    assert (paused, seen) == ([], [b"1"])


def test_a_topic_that_nobody_consumes_is_refused_with_those_that_are() -> None:
    with TestApp(app_of([])) as test:
        with pytest.raises(ConfigurationError, match="its topics are: t, u"):
            test.pause("x")
        with pytest.raises(ConfigurationError, match="partition must be a number"):
            test.resume("t", -1)
