"""A topic that a coordinator may not write to holds its own messages and no others, under each store."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import pytest
import roles
from rights_table import DOCUMENT, documented, filled_in
from roles_of_transactions import OPTIONS, commit, coordinated, in_database, in_folder, transactional
from world import STEP_S, World

import penstock
from kafka_tools import read_all
from penstock.transactions.core import quarantine
from penstock.transactions.model import PendingTransaction
from penstock.transactions.stores.kafka.administration import KafkaAdministration
from rights import give, on_topic, take
from waiting import wait_until

KEYS = [b"a", b"b", b"c"]


class Store(NamedTuple):
    coordinator: penstock.Coordinator
    producer: penstock.TransactionalProducer
    pending: Callable[[], Sequence[PendingTransaction]]


@contextmanager
def opened(part: str, world: World) -> Iterator[Store]:
    """Run a store whose coordinator is the user's."""
    administrator = world.as_administrator()
    if part == "coordinator":
        with (
            coordinated(world) as coordinator,
            transactional(administrator) as producer,
            KafkaAdministration(world.servers, world.names["prefix"], administrator.config) as operator,
        ):
            yield Store(coordinator, producer, operator.pending)
        return
    store = in_database(world) if "Sql" in part else in_folder(world)
    with (
        penstock.Coordinator(store=store, **OPTIONS) as coordinator,
        penstock.TransactionalProducer(world.names["group"], store=store) as producer,
    ):
        yield Store(coordinator, producer, store.administration().pending)


@pytest.mark.parametrize(
    "part",
    [
        "coordinator",
        pytest.param("coordinator of a SqlStore", marks=pytest.mark.thorough),
        pytest.param("process with a FileStore", marks=pytest.mark.thorough),
    ],
)
def test_a_topic_that_may_not_be_written_holds_its_own_messages_and_no_others(
    part: str, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quarantine, "_MAX_RETRY_DELAY_S", 1.0)
    allowed, forbidden = world.names["topic"], world.names["target"]
    prepare, _ = roles.PARTS[part]
    prepare(world)
    world.broker.create_topic(forbidden)
    write = on_topic(forbidden, "WRITE")
    table = documented(DOCUMENT.read_text())[part]
    give(world.broker, world.user, [*(filled_in(row, world.names) for row in table.needed), *write])

    with opened(part, world) as store:

        def send(numbers: range) -> None:
            for number in numbers:
                for topic in (allowed, forbidden):
                    store.producer.send(topic, key=KEYS[number % 3], value=b"%d" % number, execute=commit)

        send(range(3))
        wait_until(lambda: store.coordinator.statistics().committed == 6, STEP_S)
        take(world.broker, world.user, write)
        send(range(3, 9))
        wait_until(lambda: store.coordinator.statistics().committed == 12, STEP_S)
        held = store.pending()
        said = wait_until(lambda: [why for one in store.pending() if "lacks" in (why := one.waits_for)], STEP_S, 0.2)
        give(world.broker, world.user, write)
        wait_until(lambda: store.coordinator.statistics().committed == 18, STEP_S)

    assert [pending.topics for pending in held] == [(forbidden,)] * 6
    assert f"User:{world.user.name} lacks the permission Write on topic {forbidden}" in said[0]
    for topic in (allowed, forbidden):
        found = defaultdict(list)
        for message in read_all(world.broker._answering()[0].inside, topic, timeout=STEP_S):
            found[message.key()].append(message.value())
        assert found == {key: [b"%d" % number for number in range(first, 9, 3)] for first, key in enumerate(KEYS)}
