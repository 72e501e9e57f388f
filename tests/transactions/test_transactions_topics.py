"""The store's topics before they are used: leaders not known yet, brokers that do not answer, others who create."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Barrier
from types import SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException, TopicCollection
from confluent_kafka.admin import ConfigResource, NewTopic  # type: ignore[attr-defined] # not all in its __all__

from fake_admin import FakeAdmin
from penstock import clients
from penstock.clients.factory import REPLICATION_FACTOR
from penstock.clients.rights import MissingRightError
from penstock.clients.topics import (
    TopicSpec,
    await_leaders,
    ensure_topics,
    partition_counts,
    require_topics,
    single_copies,
)
from penstock.devbroker import DevBroker
from penstock.errors import BrokerConnectionError, ConfigurationError
from penstock.transactions.wire.topics import CHECK_PARTITIONS, StoreTopics, open_topics

#: A partition that has a leader.
LED = SimpleNamespace(leader=1, error=None)


class ScriptedAdmin(FakeAdmin):
    """An admin client that gives prepared answers; the last one stays."""

    #: Why nothing is known of a topic that is not in them.
    unseen = KafkaError.UNKNOWN_TOPIC_OR_PART

    def __init__(self, *answers: object) -> None:
        self.answers = list(answers)

    def list_topics(self, *, timeout: float) -> object:  # noqa: ARG002 - the client's name for it
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def describe_topics(self, topics: TopicCollection, **_: object) -> dict[str, Future[object]]:
        return {name: answered(KafkaException(KafkaError(self.unseen))) for name in topics.topic_names}


class GrantedMeanwhile(FakeAdmin):
    """An admin client that may see a topic, but could not when it first listed the topics."""

    def __init__(self) -> None:
        self._listed = iter([{}])

    def list_topics(self, *, timeout: float) -> object:  # noqa: ARG002 - the client's name for it
        there = {"orders": SimpleNamespace(partitions={0: LED, 1: LED}, error=None)}
        return SimpleNamespace(topics=next(self._listed, there))

    def describe_topics(self, topics: TopicCollection, **_: object) -> dict[str, Future[object]]:
        return {name: answered(SimpleNamespace(topic_id="id", partitions=[0, 1])) for name in topics.topic_names}

    def create_topics(self, topics: list[NewTopic]) -> dict[str, Future[object]]:
        return {
            topic.topic: answered(KafkaException(KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED))) for topic in topics
        }


def answered(answer: object) -> Future[object]:
    future: Future[object] = Future()
    if isinstance(answer, Exception):
        future.set_exception(answer)
    else:
        future.set_result(answer)
    return future


@pytest.mark.parametrize(
    "find",
    [
        lambda admin: require_topics(admin, ["orders"]),
        lambda admin: ensure_topics(admin, [TopicSpec("orders", 2)]),
    ],
)
def test_a_topic_that_may_be_seen_since_a_moment_ago_is_neither_absent_nor_to_be_created(
    find: Callable[[GrantedMeanwhile], dict[str, int]],
) -> None:
    assert find(GrantedMeanwhile()) == {"orders": 2}


@pytest.mark.parametrize("code", [KafkaError._TIMED_OUT, KafkaError.UNKNOWN])
def test_a_topic_without_an_answer_of_the_brokers_is_not_called_absent(code: int) -> None:
    admin, silent = GrantedMeanwhile(), KafkaException(KafkaError(code))
    admin.describe_topics = lambda topics, **_: dict.fromkeys(topics.topic_names, answered(silent))  # type: ignore[method-assign]

    with pytest.raises(BrokerConnectionError, match="do not say whether there is orders"):
        require_topics(admin, ["orders"])  # type: ignore[arg-type]


class Cluster(FakeAdmin):
    """An admin client of so many brokers and their default factor: None is refused, an empty one never answered."""

    def __init__(self, brokers: int, default: str | None, factor: int | None = None) -> None:
        self.replication_factor, self._default, self.made = factor, default, list[int]()
        one, three = (SimpleNamespace(replicas=list(range(copies)), leader=1, error=None) for copies in (1, 3))
        topics = {name: SimpleNamespace(partitions={0: each}, error=None) for name, each in (("a", one), ("b", three))}
        self._metadata = SimpleNamespace(brokers=dict.fromkeys(range(brokers)), topics=topics, orig_broker_id=1)

    def list_topics(self, *, timeout: float) -> object:  # noqa: ARG002 - the client's name for it
        return self._metadata

    def describe_configs(self, resources: list[ConfigResource], **_: object) -> dict[ConfigResource, Future[object]]:
        error = KafkaException(KafkaError(KafkaError.CLUSTER_AUTHORIZATION_FAILED))
        settings = {"default.replication.factor": SimpleNamespace(value=self._default)}
        answer = Future[object]() if self._default == "" else answered(error if self._default is None else settings)
        return dict.fromkeys(resources, answer)

    def create_topics(self, topics: list[NewTopic]) -> dict[str, Future[object]]:
        self.made += [topic.replication_factor for topic in topics]
        made = {topic.topic: SimpleNamespace(partitions={0: LED}, error=None) for topic in topics}
        self._metadata.topics |= made
        return {name: answered(None) for name in made}


@pytest.mark.parametrize(
    ("cluster", "of_store", "factor"),
    [
        (Cluster(3, "1"), True, 3),
        (Cluster(3, None), True, 3),
        (Cluster(3, ""), True, 3),
        (Cluster(5, "5"), True, 5),
        (Cluster(2, "1"), True, -1),
        (Cluster(3, "1"), False, -1),
        (Cluster(3, "3", factor=2), True, 2),
        (Cluster(3, "1", factor=2), False, 2),
    ],
)
def test_topics_of_a_store_have_three_copies_where_there_are_three_brokers_unless_it_is_said(
    cluster: Any, of_store: bool, factor: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.clients.topics.CONNECT_TIMEOUT_S", 0.2)

    ensure_topics(cluster, [TopicSpec("new", 1)], of_store=of_store)

    assert cluster.made == [factor]


def test_a_topic_with_one_copy_is_named_where_there_are_three_brokers_and_it_is_not_wanted_so() -> None:
    clusters: list[Any] = [Cluster(3, "1"), Cluster(2, "1"), Cluster(3, "1", factor=1)]

    found = [single_copies(each) for each in clusters]

    assert [len(each) for each in found] == [1, 0, 0]
    assert found[0][0].startswith("topic a has replication factor 1 on a cluster of 3 brokers")
    assert single_copies(clusters[0], ["b", "none"]) == []


@pytest.mark.parametrize(("given", "factor"), [({}, None), ({REPLICATION_FACTOR: "2"}, 2)])
def test_the_option_for_copies_reaches_what_creates_and_not_the_library(
    given: dict[str, object], factor: object
) -> None:
    assert clients.admin("127.0.0.1:1", given).replication_factor == factor
    clients.producer("127.0.0.1:1", given)

    with pytest.raises(ConfigurationError, match="must be a whole number of at least 1"):
        clients.admin("127.0.0.1:1", {REPLICATION_FACTOR: "0"})


def leaders(*numbers: int) -> SimpleNamespace:
    partitions = {place: SimpleNamespace(leader=number, error=None) for place, number in enumerate(numbers)}
    return SimpleNamespace(topics={"store.half": SimpleNamespace(partitions=partitions)})


def test_leaders_are_waited_for_past_answers_that_do_not_come() -> None:
    silence = KafkaException(KafkaError(KafkaError._TRANSPORT))
    admin = ScriptedAdmin(SimpleNamespace(topics={}), silence, leaders(1, -1), leaders(1, 1))

    counts = await_leaders(admin, ["store.half"])  # type: ignore[arg-type] # what is used of it

    assert counts == {"store.half": 2}
    assert len(admin.answers) == 1


def test_a_topic_that_may_be_created_and_not_seen_is_a_missing_right_at_once() -> None:
    admin = ScriptedAdmin(SimpleNamespace(topics={}))
    admin.unseen = KafkaError.TOPIC_AUTHORIZATION_FAILED

    with pytest.raises(MissingRightError, match=r"orders cannot be seen .* lacks the permission Describe on topic ord"):
        await_leaders(admin, ["orders"])  # type: ignore[arg-type] # what is used of it


def test_those_who_open_a_new_store_at_the_same_time_agree_on_its_partitions(
    broker: DevBroker, new_topic: Callable[..., str]
) -> None:
    prefix, servers, together = new_topic(), broker.bootstrap_servers, Barrier(4)

    def opened(partitions: int) -> StoreTopics:
        admin = clients.admin(servers, {})
        partition_counts(admin)  # connected before the others are met
        together.wait(60)
        return open_topics(admin, prefix, partitions)

    with ThreadPoolExecutor(4) as pool:
        stores = list(pool.map(opened, (1, 2, 3, 4)))

    assert len(set(stores)) == 1
    assert stores[0].partitions in {1, 2, 3, 4}
    assert stores[0].check_partitions == CHECK_PARTITIONS


@pytest.mark.parametrize("last", [KafkaException(KafkaError(KafkaError._TRANSPORT)), leaders(1, -1)])
def test_topics_without_a_leader_are_named_when_the_time_is_over(last: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.clients.topics.CONNECT_TIMEOUT_S", 0.2)

    with pytest.raises(BrokerConnectionError, match=r"store\.half at 127\.0\.0\.1:1 had no leader for 0\.2 s"):
        await_leaders(ScriptedAdmin(last), ["store.half"])  # type: ignore[arg-type] # as above
