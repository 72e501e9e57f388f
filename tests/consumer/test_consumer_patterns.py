"""Topics that match a pattern, also those that are created while the app runs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

import pytest
from confluent_kafka.admin import AdminClient

import penstock
from kafka_tools import produce
from penstock.clients.rights import THIS_CLIENT, MissingRightError, Operation, topic_right
from penstock.clients.topics import TopicSpec, ensure_topics
from penstock.consumer import handler
from penstock.consumer.handlers.registry import TopicPatterns
from penstock.devbroker import DevBroker
from penstock.errors import ConfigurationError
from penstock.testing import TestApp, TestBroker
from waiting import wait_until

#: Seconds within which a topic is found: two searches.
FOUND_S = 60


def app_of(seen: list[tuple[str, bytes | None]], pattern: str = r"orders\..*", **options: object) -> penstock.App:
    config = options.pop("config", {})
    app = penstock.App("app", bootstrap_servers="memory:0", config=config)  # type: ignore[arg-type] # the tests name keys
    app.handler(pattern=pattern, **options)(lambda message: seen.append((message.topic, message.value)))  # type: ignore[arg-type] # as above
    return app


def test_topics_that_match_as_a_whole_are_consumed_and_a_topic_with_a_handler_of_its_own_is_that_handlers() -> None:
    seen: list[tuple[str, bytes | None]] = []
    own: list[bytes | None] = []
    app = app_of(seen)
    app.handler("orders.us")(lambda message: own.append(message.value))

    with TestApp(app, topics=["orders.eu", "orders.us", "myorders.eu"]) as test:
        for topic in ("orders.eu", "orders.us", "myorders.eu"):
            test.send(topic, topic)
        test.settle()

    assert (seen, own) == ([("orders.eu", b"orders.eu")], [b"orders.us"])


@pytest.mark.parametrize("reset", ["earliest", "latest", "error"])
def test_a_topic_that_comes_up_while_it_runs_is_taken_up_from_its_first_message(reset: str) -> None:
    seen: list[tuple[str, bytes | None]] = []

    with TestApp(app_of(seen, config={"auto.offset.reset": reset})) as test:
        test.settle()
        waiting = [str(explanation) for explanation in test.explain()]
        test.broker.create_topic("orders.new", 1)
        test.send("orders.new", "before it was found")
        test.advance(FOUND_S)
        committed = test.committed("orders.new")

    assert ["no topic matches this pattern yet" in item for item in waiting] == [True]
    assert seen == [("orders.new", b"before it was found")]
    assert committed == {0: 1}


@pytest.mark.parametrize("reset", ["earliest", "latest"])
def test_a_topic_that_was_taken_up_while_it_was_empty_is_no_old_one_for_who_comes_next(reset: str) -> None:
    seen: list[tuple[str, bytes | None]] = []

    with TestApp(app_of(seen, config={"auto.offset.reset": reset})) as test:
        test.settle()
        test.broker.create_topic("orders.new", 2)
        test.advance(FOUND_S)
        committed = test.committed("orders.new")
        test.crash()
        test.send("orders.new", "while nobody was there")
        test.restart()
        test.advance(FOUND_S)

    assert committed == {0: 0, 1: 0}
    assert seen == [("orders.new", b"while nobody was there")]


def test_a_topic_that_is_deleted_is_let_go_and_taken_up_when_it_is_recreated() -> None:
    seen: list[tuple[str, bytes | None]] = []

    with TestApp(app_of(seen), topics=["orders.a", "orders.b"]) as test:
        test.send("orders.a", "1")
        test.advance(FOUND_S)
        test.broker.delete_topic("orders.a")
        test.advance(2 * FOUND_S)
        assigned = {partition.topic for partition in test.statistics().partitions}
        test.send("orders.b", "2")
        test.settle()
        test.broker.create_topic("orders.a", 1)
        test.send("orders.a", "3")
        test.advance(FOUND_S)

    assert assigned == {"orders.b"}
    assert seen == [("orders.a", b"1"), ("orders.b", b"2"), ("orders.a", b"3")]


def test_a_topic_that_is_found_has_its_dead_letters_and_retries_which_no_pattern_matches() -> None:
    app = penstock.App("app", bootstrap_servers="memory:0")
    seen: list[str] = []

    @app.handler(pattern=".+", on_failure="dead_letter", retry_delays=(1,), retry=penstock.retry(attempts=1))
    def fail(message: penstock.Message) -> None:
        seen.append(message.topic)
        raise ValueError

    with TestApp(app) as test:
        test.settle()
        test.broker.create_topic("orders", 1)
        test.send("orders", "1")
        test.advance(2 * FOUND_S)
        letters = test.dead_letters("orders")

    assert ([sent.value for sent in letters], seen) == ([b"1"], ["orders", "orders"])


def test_a_topic_that_two_patterns_match_is_for_the_first_registered_and_the_log_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    first: list[tuple[str, bytes | None]] = []
    second: list[bytes | None] = []
    app = app_of(first)
    app.handler(pattern=r".*\.eu")(lambda message: second.append(message.value))

    with TestApp(app, topics=["orders.eu"]) as test:
        test.send("orders.eu", "1")
        test.settle()
        test.broker.create_topic("orders.later.eu", 1)
        test.send("orders.later.eu", "2")
        test.advance(2 * FOUND_S)

    assert (first, second) == ([("orders.eu", b"1"), ("orders.later.eu", b"2")], [])
    for topic in ("orders.eu", "orders.later.eu"):
        assert caplog.text.count(f"{topic} is matched by the patterns of several handlers") == 1


def test_no_pattern_takes_internal_topics_or_those_of_other_programs() -> None:
    def function(_message: penstock.Message) -> None: ...

    named = {"payments": handler(function, on_failure="dead_letter", dead_letter_topic="refused")}
    everything = handler(function, on_failure="dead_letter", dead_letter_topic="{topic}.dlq")
    patterns = TopicPatterns({".+": everything}, named, left_out={"penstock.half"})
    reserved = [
        "__consumer_offsets",
        "__transaction_state",
        "payments",
        "refused",
        "orders.dlq",
        "retry.app.orders.60s",
        "penstock.half",
    ]

    assert list(patterns.matches([*reserved, "orders", "dlq.orders"])) == ["orders", "dlq.orders"]


def test_a_topic_that_cannot_be_consumed_stands_in_explain_and_its_pattern_is_not_said_to_match_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[tuple[str, bytes | None]] = []
    create, refused = TestBroker.ensure_topics, ["dlq.orders.b"]

    def ensure_topics(broker: TestBroker, specs: Iterable[TopicSpec]) -> None:
        wanted = list(specs)
        if any(topic.name in refused for topic in wanted):
            right = topic_right(Operation.CREATE, "dlq.orders.b")
            raise MissingRightError("it cannot be created", [right], THIS_CLIENT)
        create(broker, wanted)

    monkeypatch.setattr(TestBroker, "ensure_topics", ensure_topics)
    with TestApp(app_of(seen, on_failure="dead_letter")) as test:
        test.settle()
        test.broker.create_topic("orders.b", 1)
        test.send("orders.b", "1")
        test.advance(2 * FOUND_S)
        alone = [str(explanation) for explanation in test.explain()]
        test.broker.create_topic("orders.a", 1)
        test.send("orders.a", "1")
        test.advance(FOUND_S)
        before = list(seen)
        refused.clear()
        test.advance(FOUND_S)

    assert len(alone) == 1
    assert "orders.b: no partition; it matches a pattern and cannot be consumed" in alone[0]
    assert f"{THIS_CLIENT} lacks the permission Create on topic dlq.orders.b" in alone[0]
    assert caplog.text.count("topic orders.b matches a pattern and cannot be consumed") == 1
    assert before == [("orders.a", b"1")]
    assert seen == [*before, ("orders.b", b"1")]


def test_a_topic_can_be_paused_once_it_was_found_and_resumed_when_it_was_deleted() -> None:
    seen: list[tuple[str, bytes | None]] = []

    with TestApp(app_of(seen)) as test:
        with pytest.raises(ConfigurationError, match="its topics are: none yet"):
            test.pause("orders.a")
        test.broker.create_topic("orders.a", 1)
        test.advance(FOUND_S)
        test.pause("orders.a")
        test.settle()
        test.broker.delete_topic("orders.a")
        test.advance(2 * FOUND_S)
        test.broker.create_topic("orders.a", 1)
        test.send("orders.a", "1")
        test.advance(FOUND_S)
        while_paused = list(seen)
        test.broker.delete_topic("orders.a")
        test.advance(2 * FOUND_S)
        test.resume("orders.a")
        test.broker.create_topic("orders.a", 1)
        test.send("orders.a", "2")
        test.advance(FOUND_S)

    assert (while_paused, seen) == ([], [("orders.a", b"2")])


def test_what_is_no_pattern_is_refused_where_it_is_written() -> None:
    app = penstock.App("app", bootstrap_servers="memory:0")

    for topics, pattern, why in (
        ((), "(", "no regular expression"),
        ((), " ", "pattern must be"),
        (("t",), "t", "not both"),
    ):
        with pytest.raises(ConfigurationError, match=why):
            app.handler(*topics, pattern=pattern)(lambda _: None)
    with pytest.raises(ConfigurationError, match="round for ever"):
        app.handler(pattern=".+", to="out")(lambda _: 1)


@pytest.mark.parametrize("protocol", ["classic", pytest.param("consumer", marks=pytest.mark.thorough)])
def test_a_topic_that_comes_up_on_a_real_broker_is_taken_up_with_both_protocols(
    broker: DevBroker, admin: AdminClient, new_topic: Callable[..., str], protocol: str
) -> None:
    servers, first = broker.bootstrap_servers, new_topic()
    second = f"{first}.later"
    seen: list[tuple[str, bytes | None]] = []
    config = {
        "topic.metadata.refresh.interval.ms": 300,
        "group.protocol": protocol,
        "auto.offset.reset": "latest",
    }
    app = penstock.App(f"app-{first}", bootstrap_servers=servers, commit_interval=0.1, config=config)
    app.handler(pattern=re.escape(first) + r"\..*")(lambda message: seen.append((message.topic, message.value)))

    with app.start() as running:
        ensure_topics(admin, [TopicSpec(second, 2)])
        produce(servers, second, [(b"k", b"1")])
        wait_until(lambda: seen == [(second, b"1")])
        running.pause(second)
        wait_until(lambda: [partition.paused for partition in running.statistics().partitions] == ["by the app"] * 2)
        ensure_topics(admin, [TopicSpec(f"{first}.third", 1)])
        produce(servers, f"{first}.third", [(b"k", b"3")])
        produce(servers, second, [(b"k", b"2")])
        wait_until(lambda: (f"{first}.third", b"3") in seen)
        while_paused = list(seen)
        running.resume(second)
        wait_until(lambda: (second, b"2") in seen)

    assert (second, b"2") not in while_paused
