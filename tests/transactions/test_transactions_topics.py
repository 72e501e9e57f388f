"""The store's topics before they are used: leaders not known yet, brokers that do not answer, others who create."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import Barrier
from types import SimpleNamespace

import pytest
from confluent_kafka import KafkaError, KafkaException, TopicCollection
from confluent_kafka.admin import NewTopic

from penstock import clients
from penstock.clients.requests.topics import TopicSpec, ensure_topics, partition_counts, require_topics
from penstock.devbroker import DevBroker
from penstock.errors import BrokerConnectionError
from penstock.transactions.wire import topics as topics_module
from penstock.transactions.wire.topics import CHECK_PARTITIONS, StoreTopics, _await_leaders, open_topics


class ScriptedAdmin:
    """An admin client that gives prepared answers; the last one stays."""

    def __init__(self, *answers: object) -> None:
        self.answers = list(answers)

    def list_topics(self, *, timeout: float) -> object:  # noqa: ARG002 - the client's name for it
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


class GrantedMeanwhile:
    """An admin client that may see a topic, but could not when it first listed the topics."""

    def __init__(self) -> None:
        self._listed = iter([{}])

    def list_topics(self, *, timeout: float) -> object:  # noqa: ARG002 - the client's name for it
        there = {"orders": SimpleNamespace(partitions={0: None, 1: None}, error=None)}
        return SimpleNamespace(topics=next(self._listed, there))

    def describe_topics(self, topics: TopicCollection, **_: object) -> dict[str, Future[object]]:
        return {name: answered(SimpleNamespace(topic_id="id")) for name in topics.topic_names}

    def create_topics(self, topics: list[NewTopic]) -> dict[str, Future[object]]:
        return {
            topic.topic: answered(KafkaException(KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED))) for topic in topics
        }

    def poll(self, _timeout: float) -> int:
        return 0


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
        lambda admin: require_topics(admin, "127.0.0.1:1", ["orders"]),
        lambda admin: ensure_topics(admin, "127.0.0.1:1", [TopicSpec("orders", 2)]),
    ],
)
def test_a_topic_that_may_be_seen_since_a_moment_ago_is_neither_absent_nor_to_be_created(
    find: Callable[[GrantedMeanwhile], dict[str, int]],
) -> None:
    assert find(GrantedMeanwhile()) == {"orders": 2}


def leaders(*numbers: int) -> SimpleNamespace:
    partitions = {place: SimpleNamespace(leader=number, error=None) for place, number in enumerate(numbers)}
    return SimpleNamespace(topics={"store.half": SimpleNamespace(partitions=partitions)})


def test_leaders_are_waited_for_past_answers_that_do_not_come() -> None:
    silence = KafkaException(KafkaError(KafkaError._TRANSPORT))
    admin = ScriptedAdmin(SimpleNamespace(topics={}), silence, leaders(1, -1), leaders(1, 1))

    counts = _await_leaders(admin, "127.0.0.1:1", ["store.half"])  # type: ignore[arg-type] # what is used of it

    assert counts == {"store.half": 2}
    assert len(admin.answers) == 1


def test_those_who_open_a_new_store_at_the_same_time_agree_on_its_partitions(
    broker: DevBroker, new_topic: Callable[..., str]
) -> None:
    prefix, servers, together = new_topic(), broker.bootstrap_servers, Barrier(4)

    def opened(partitions: int) -> StoreTopics:
        admin = clients.admin(servers, {})
        partition_counts(admin, servers)  # connected before the others are met
        together.wait(60)
        return open_topics(admin, servers, prefix, partitions)

    with ThreadPoolExecutor(4) as pool:
        stores = list(pool.map(opened, (1, 2, 3, 4)))

    assert len(set(stores)) == 1
    assert stores[0].partitions in {1, 2, 3, 4}
    assert stores[0].check_partitions == CHECK_PARTITIONS


@pytest.mark.parametrize("last", [KafkaException(KafkaError(KafkaError._TRANSPORT)), leaders(1, -1)])
def test_topics_without_a_leader_are_named_when_the_time_is_over(last: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topics_module, "CONNECT_TIMEOUT_S", 0.2)

    with pytest.raises(BrokerConnectionError, match=r"store\.half at 127\.0\.0\.1:1 had no leader for 0\.2 s"):
        _await_leaders(ScriptedAdmin(last), "127.0.0.1:1", ["store.half"])  # type: ignore[arg-type] # as above
