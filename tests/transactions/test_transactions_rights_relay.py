"""Rights of the coordinators of stores that are not in Kafka: the fewest do, and each that lacks is told."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from secured_store import ANSWER_S, NewTopic, NewUser, RelaySecured, committed, relay_rights, told

from penstock.clients.rights import MissingRightError
from penstock.devbroker import DevBroker
from penstock.transactions.stores.relay import coordinator as relay_coordinator
from rights import Right, give, on_topic, on_transactional_id, take
from waiting import wait_until

OWN = {"file": "file.", "sqlite": "sql-"}


@pytest.fixture(params=["file", pytest.param("sqlite", marks=pytest.mark.chaos)], scope="module")
def store(
    request: pytest.FixtureRequest, secured: DevBroker, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RelaySecured]:
    """A store whose coordinator has what it needs and no more."""
    folder, target = tmp_path_factory.mktemp("store"), f"relay-{time.time_ns()}"
    secured.create_topic(target)
    where = folder / "store" if request.param == "file" else f"sqlite:///{folder / 'store.db'}"
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(relay_coordinator, "_TRIM_S", 0.5)
        made = RelaySecured(secured, secured.user(target), f"store.{target}", where, target)
        with made.open:
            made.send(target, b"k", b"first")
            wait_until(lambda: made.statistics().committed == 1, ANSWER_S)
            yield made


def own(store: RelaySecured) -> str:
    return f"{store.prefix}.{'file.' if store.kind == 'file' else 'sql-'}"


@pytest.mark.parametrize(
    ("rights", "named"),
    [
        (lambda name: on_topic(name, "write", prefix=True), "Write on topic {own}"),
        (lambda name: on_topic(name, "delete", prefix=True), "Delete on topic {own}"),
        (lambda name: on_transactional_id(name, "write", prefix=True), "Write on transactional-id {own}"),
    ],
)
def test_a_relay_tells_what_it_lacks_keeps_all_and_goes_on_when_it_is_given(
    store: RelaySecured, rights: Callable[[str], list[Right]], named: str
) -> None:
    before, lacking, named = store.statistics().committed, rights(own(store)), named.format(own=own(store))
    take(store.broker, store.user, lacking)

    topic = store.user.name
    store.send(topic, b"k", b"1")
    told(store, f"lacks the right {named}")
    store.send(topic, b"k", b"2")
    give(store.broker, store.user, lacking)

    wait_until(lambda: store.statistics().committed == before + 2, ANSWER_S)
    wait_until(lambda: not store.statistics().missing_rights, ANSWER_S)
    assert committed(store.broker, topic)[b"k"][-2:] == [b"1", b"2"]
    assert len(committed(store.broker, topic)[b"k"]) == before + 2


@pytest.mark.parametrize("kind", ["file", "sqlite"])
def test_a_relay_that_starts_without_its_log_tells_it(
    kind: str, secured: DevBroker, new_user: NewUser, new_secured_topic: NewTopic, tmp_path: Path
) -> None:
    target, user = new_secured_topic(), new_user()
    where = tmp_path / "store" if kind == "file" else f"sqlite:///{tmp_path / 'store.db'}"
    lacking = [*on_topic(f"store.{target}.{OWN[kind]}", "create", "read", "write", "delete", prefix=True)]
    rights = [right for right in relay_rights(f"store.{target}", OWN[kind], target) if right not in lacking]
    made = RelaySecured(secured, user, f"store.{target}", where, target, rights=rights, started=False)

    with pytest.raises(MissingRightError) as caught:
        made.coordinator.start()

    assert {str(right).split(" ")[0] for right in caught.value.rights} == {"Read", "Write", "Delete"}
    assert f"User:{user.name}" in str(caught.value)


def test_a_relay_that_may_not_read_its_log_tells_it_and_goes_on_when_it_may(
    secured: DevBroker, new_user: NewUser, new_secured_topic: NewTopic, tmp_path: Path
) -> None:
    target, user = new_secured_topic(), new_user()
    made = RelaySecured(secured, user, f"store.{target}", tmp_path / "store", target, started=False)
    reading = on_topic(f"store.{target}.file.", "read", prefix=True)
    # Its log holds something, or there would be nothing to read.
    made.coordinator.start()
    with made.producer:
        made.send(target, b"k", b"1")
        wait_until(lambda: made.statistics().committed == 1, ANSWER_S)
    made.coordinator.stop()
    take(secured, user, reading)
    made.renew()
    made.coordinator.start()
    with made.producer:
        made.send(target, b"k", b"2")
        told(made, f"Read on topic store.{target}.file.")
        give(secured, user, reading)
        wait_until(lambda: committed(secured, target).get(b"k") == [b"1", b"2"], ANSWER_S)
    made.coordinator.stop()
