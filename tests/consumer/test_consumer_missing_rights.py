"""Missing permissions: the log lines, what is kept, and how work goes on. tests/security has the parts."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
from confluent_kafka import KafkaError
from stepped import Stepped, new_item

from penstock.app import App
from penstock.clients.cluster import Cluster
from penstock.clients.rights import THIS_CLIENT, MissingRightError, Operation, Right, group_right, topic_right
from penstock.consumer import Explanation, handler, retry
from penstock.consumer.handlers.results import Result
from penstock.consumer.outbox.outbox import Submission
from penstock.consumer.outbox.plain_outbox import PlainOutbox
from penstock.devbroker import DevBroker, User
from penstock.message import Message
from penstock.testing import TestApp
from rights import give, on_topic
from support.consumers import PoisonError
from waiting import wait_until

#: Seconds within which what is missing must be said, and what was given be used.
SOON_S = 10

READ, GROUP = topic_right(Operation.READ, "t"), group_right("app")


def app_of(handled: list[bytes | None]) -> App:
    app = App("app", bootstrap_servers="memory:0")

    @app.handler("t", retry=retry(attempts=1), on_failure="dead_letter", retry_delays=(1,))
    def handle(message: Message) -> None:
        if message.value == b"poison":
            raise PoisonError
        handled.append(message.value)

    return app


def of_topic(test: TestApp) -> Explanation:
    return next(explanation for explanation in test.explain() if explanation.topic == "t")


def test_a_start_names_all_rights_that_are_missing_and_makes_no_topic() -> None:
    test, missing = TestApp(app_of([])), {GROUP, READ, topic_right(Operation.WRITE, "dlq.t")}
    test.broker.missing_rights |= missing

    with pytest.raises(MissingRightError) as refused:
        test.start()

    assert [str(right) for right in missing if str(right) not in str(refused.value)] == []
    assert test.broker.topics().keys() == {"t"}


@pytest.mark.parametrize("right", [READ, GROUP], ids=str)
def test_a_right_that_is_taken_away_is_said_once_and_stands_in_explain_until_it_is_given(
    right: Right, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with TestApp(app_of([])) as test:
        test.send("t", "fine")
        test.settle()
        test.broker.missing_rights.add(right)
        if right is GROUP:
            test.broker.fail_by_chance("commit", KafkaError.GROUP_AUTHORIZATION_FAILED, 1.0)
        else:
            test.broker.fail("fetch", KafkaError.TOPIC_AUTHORIZATION_FAILED)
        test.send("t", "fine")
        for _ in range(SOON_S):
            test.advance(1)
        said, logged = of_topic(test), caplog.text.count(right.command(THIS_CLIENT))
        for _ in range(SOON_S):
            test.advance(1)
        again = caplog.text.count(right.command(THIS_CLIENT))
        test.broker.missing_rights.clear()
        test.broker.fail_by_chance("commit", 0, 0)
        for _ in range(SOON_S):
            test.advance(1)

        assert right.command(THIS_CLIENT) in str(said)
        assert (logged, again) == (1, 1)
        assert of_topic(test).trouble is None
        assert test.committed("t") == {0: 2}


def test_results_that_may_not_be_written_say_so_once_and_are_written_once_they_may(
    caplog: pytest.LogCaptureFixture,
) -> None:
    app = App("app", bootstrap_servers="memory:0")
    app.handler("t", to="out", retry=retry(attempts=99))(lambda message: message.value)

    with TestApp(app) as test:
        test.broker.fail_by_chance("produce", KafkaError.TOPIC_AUTHORIZATION_FAILED, 1.0)
        for number in range(5):
            test.send("t", str(number), key="k")
        test.advance(30)
        test.broker.fail_by_chance("produce", 0, 0)
        test.advance(30)

        assert caplog.text.count(topic_right(Operation.WRITE, "out").command(THIS_CLIENT)) == 1
        assert sorted(filter(None, (message.value for message in test.published("out")))) == [
            b"%d" % number for number in range(5)
        ]


def test_dead_letters_are_written_by_a_new_client_where_the_producer_has_failed_for_ever_and_in_order() -> None:
    handled: list[bytes | None] = []
    app = App("app", bootstrap_servers="memory:0")

    @app.handler("t", retry=retry(attempts=1), on_failure="dead_letter")
    def handle(message: Message) -> None:
        if message.value is not None and message.value.startswith(b"poison"):
            raise PoisonError
        handled.append(message.value)

    with TestApp(app) as test:
        test.broker.fail(
            "produce", KafkaError(KafkaError.CLUSTER_AUTHORIZATION_FAILED, "no id is given", fatal=True), times=2
        )
        for value in ("poison 1", "poison 2", "behind"):
            test.send("t", value, key="bad")
        test.send("t", "fine", key="good")
        test.settle()
        held, said = test.committed("t").get(0, 0), str(of_topic(test))
        for _ in range(30):
            test.advance(1)

        assert test.broker.faults.happened.total() == 2
        assert held == 0
        assert topic_right(Operation.WRITE, "dlq.t").command(THIS_CLIENT) in said
        assert [letter.value for letter in test.dead_letters("t")] == [b"poison 1", b"poison 2"]
        assert handled == [b"fine", b"behind"]
        assert sum(test.committed("t").values()) == 4


def test_many_dead_letters_that_lack_the_same_right_are_one_line_of_the_log(caplog: pytest.LogCaptureFixture) -> None:
    app = App("app", bootstrap_servers="memory:0")

    @app.handler("t", retry=retry(attempts=1), on_failure="dead_letter")
    def handle(_message: Message) -> None:
        raise PoisonError

    with TestApp(app) as test:
        test.broker.fail_by_chance("produce", KafkaError.TOPIC_AUTHORIZATION_FAILED, 1.0)
        for number in range(50):
            test.send("t", "poison", key=f"k{number}")
        test.settle()
        test.advance(6)
        refused = test.statistics().dead_letter_failures
        said = caplog.text.count(topic_right(Operation.WRITE, "dlq.t").command(THIS_CLIENT))
        test.broker.fail_by_chance("produce", 0, 0)
        test.advance(6)

        assert (refused, said) == (100, 1)
        assert test.statistics().dead_letters == 50


def test_a_client_that_a_refused_heartbeat_has_ended_is_followed_by_a_new_one() -> None:
    handled: list[bytes | None] = []

    def handle(message: Message) -> None:
        handled.append(message.value)

    world = Stepped({"t": handler(handle)})
    ended = world.consumer.client
    # As librdkafka 2.16 tells it with group.protocol=consumer.
    text = "Fatal error: Broker: Group authorization failed: ConsumerGroupHeartbeat fatal error"
    world.broker.fail("fetch", KafkaError(KafkaError._FATAL, text))
    world.feed("t", [(b"k", b"1")])
    shut_out = world.loop.refusals.of_group()
    engine = world.consumer.engine
    said = str(world.loop.explain()[0])
    assigned, failed = engine.assignments.all(), engine.counts.failed_commits
    while world.consumer.client is ended:
        world.broker.advance(1)
        world.poll()
    # Its session ends by the clock.
    ended.kill()
    for _ in range(20):
        world.broker.advance(SOON_S)
        world.poll()
        world.serve()

    assert world.broker.faults.happened.total() == 1
    assert assigned == []
    assert failed == 0
    assert shut_out is not None
    assert said == f"t: no partition; {shut_out}"
    assert group_right("g").command(THIS_CLIENT) in shut_out
    assert world.loop.refusals.of_group() is None
    assert world.loop.stop_request.failure is None
    assert handled == [b"1"]
    assert world.committed("t") == 1


NewTopic = Callable[..., str]
NewUser = Callable[..., User]


def test_a_topic_that_does_not_exist_is_distinguished_by_who_may_know_and_is_a_missing_right_for_others(
    secured: DevBroker, new_user: NewUser
) -> None:
    user = new_user()
    cluster = Cluster(secured.bootstrap_servers, user.config)

    with pytest.raises(MissingRightError, match="topic no-such cannot be seen"):
        cluster.require_topics(["no-such"])
    give(secured, user, on_topic("no-such", "describe"))
    with pytest.raises(LookupError, match="no such topic"):
        cluster.require_topics(["no-such"])


def test_a_producer_that_may_write_nowhere_fails_for_ever_and_its_follower_writes_once_it_may(
    secured: DevBroker, new_secured_topic: NewTopic, new_user: NewUser
) -> None:
    topic = new_secured_topic()
    user = new_user(*on_topic(topic, "describe"))
    cluster = Cluster(secured.bootstrap_servers, user.config)
    outbox = PlainOutbox()
    outbox.connect(cluster, {**user.config, "enable.idempotence": True, "log_level": 0})
    ended: list[Submission] = []

    def is_sent() -> bool:
        count = len(ended)
        outbox.submit([new_item()], [Result(topic, b"v", b"k", [], -1)], ended.append)
        wait_until(lambda: outbox.serve() is None and len(ended) > count, timeout=60)
        return ended[-1].is_written

    def is_forbidden() -> bool:
        refusal = None if is_sent() else ended[-1].refusal
        return refusal is not None and refusal[1].code() == KafkaError.CLUSTER_AUTHORIZATION_FAILED

    wait_until(is_forbidden, timeout=60)
    give(secured, user, on_topic(topic, "write"))
    wait_until(is_sent, timeout=60)
