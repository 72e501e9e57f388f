"""Topics and partitions that the app itself pauses."""

from __future__ import annotations

import pytest

import penstock
from penstock.consumer import DeferredCompletion
from penstock.errors import ConfigurationError
from penstock.testing import TestApp, TestBroker


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
        while_paused, said = (
            list(seen),
            next(str(explanation) for explanation in test.explain() if explanation.topic == "t"),
        )
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
        test.pause("t", 1)
        said = {explanation.partition: str(explanation) for explanation in test.explain() if explanation.topic == "t"}
        for partition in (0, 1):
            test.send("t", str(partition), partition=partition)
        test.settle()
        paused = list(seen)
        test.resume("t", 1)
        test.settle()

    assert (paused, seen) == ([], [b"1"])
    assert "running.resume('t') lets it go on" in said[0]
    assert "running.resume('t', 1) lets it go on" in said[1]


def test_neither_back_pressure_nor_the_app_ends_the_pause_of_the_other() -> None:
    out: list[DeferredCompletion] = []
    app = penstock.App("app", bootstrap_servers="memory:0", max_in_flight=2)

    @app.handler("t", order="none")
    def begin(_message: penstock.Message) -> DeferredCompletion:
        out.append(DeferredCompletion())
        return out[-1]

    def paused(test: TestApp) -> str | None:
        test.advance(1)
        return test.statistics().partitions[0].paused

    def write(test: TestApp) -> None:
        for _ in range(2):
            test.send("t", "v")
            test.settle()

    with TestApp(app) as test:
        write(test)
        full = paused(test)
        test.pause("t")
        both = paused(test)
        write(test)
        test.resume("t")
        full_still = paused(test), len(out)
        test.pause("t")
        for completion in out:
            completion.complete()
        by_the_app_still = paused(test), len(out)
        test.resume("t")
        test.settle()
        at_last = len(out)
        for completion in out[2:]:
            completion.complete()

    assert (full, both, full_still) == ("parked limit", "by the app", ("parked limit", 2))
    assert (by_the_app_still, at_last) == (("by the app", 2), 4)


def test_a_retry_topic_is_paused_with_its_topic_and_not_with_a_partition_of_it() -> None:
    seen: list[str] = []
    app = penstock.App("app", bootstrap_servers="memory:0")

    @app.handler("t", retry=penstock.retry(attempts=1), retry_delays=(1,), on_failure="drop")
    def fail(message: penstock.Message) -> None:
        # Before the message is in its retry topic.
        test.pause("t", 0 if message.key == b"partition" else None)
        seen.append(message.topic)
        raise ValueError

    def send(key: str) -> tuple[dict[str, bool], int]:
        """Return which topics are paused 10 s later, and how often the handler was called by then."""
        test.send("t", "v", key=key)
        test.advance(10)
        return {explanation.topic: "paused (by the app" in str(explanation) for explanation in test.explain()}, len(
            seen
        )

    test = TestApp(app)
    with test:
        partition = send("partition")
        test.resume("t", 0)
        whole = send("topic")
        test.resume("t")
        test.advance(10)

    assert partition == ({"t": True, "retry.app.t.1s": False}, 2)
    assert whole == ({"t": True, "retry.app.t.1s": True}, 3)
    assert len(seen) == 4


def test_a_partition_that_another_member_has_is_paused_here_once_it_comes() -> None:
    broker = TestBroker()
    broker.create_topic("t", 2)
    seen: list[bytes | None] = []
    app = penstock.App("app", bootstrap_servers="memory:0")
    app.handler("t")(lambda message: seen.append(message.value))

    def partitions(test: TestApp) -> dict[int, str | None]:
        return {partition.partition: partition.paused for partition in test.statistics().partitions}

    with TestApp(app, broker) as test:
        with TestApp(app, broker) as other:
            for _ in range(20):
                test.advance(1)
                other.settle()
            alone = partitions(test)
            (elsewhere,) = partitions(other)
            test.pause("t", elsewhere)
            test.advance(1)
            before = partitions(test)
        for _ in range(20):
            test.advance(1)
        for number in (0, 1):
            test.send("t", str(number), partition=number)
        test.settle()

        assert len(alone) == 1
        assert before == alone
        assert partitions(test) == {**alone, elsewhere: "by the app"}

    assert seen == [str(1 - elsewhere).encode()]


def test_a_topic_without_a_handler_is_refused_with_the_consumed_ones() -> None:
    with TestApp(app_of([])) as test:
        with pytest.raises(ConfigurationError, match="its topics are: t, u"):
            test.pause("x")
        with pytest.raises(ConfigurationError, match="partition must be a number"):
            test.resume("t", -1)
