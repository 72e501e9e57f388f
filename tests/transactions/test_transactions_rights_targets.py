"""A target on which WRITE is missing holds its own messages, under each store; they go when the right is given."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from secured_store import ANSWER_S, KafkaSecured, NewTopic, NewUser, RelaySecured, SecuredStore, committed

from databases import new_database
from penstock.devbroker import DevBroker
from penstock.transactions.writing import target_quarantine
from rights import give, on_topic, take
from waiting import wait_until

KEYS = [b"a", b"b", b"c"]


@pytest.fixture
def target(new_secured_topic: NewTopic) -> str:
    """A topic that the coordinator may write to."""
    return new_secured_topic()


@pytest.fixture(params=["kafka", "file", "sqlite", "postgresql"])
def store(
    request: pytest.FixtureRequest, secured: DevBroker, new_user: NewUser, target: str, tmp_path: Path
) -> Iterator[SecuredStore]:
    user, prefix = new_user(), f"store.{target}"
    made: SecuredStore
    if request.param == "kafka":
        made = KafkaSecured(secured, user, prefix, target)
    elif request.param == "file":
        made = RelaySecured(secured, user, prefix, tmp_path / "store", target)
    elif request.param == "sqlite":
        made = RelaySecured(secured, user, prefix, f"sqlite:///{tmp_path / 'store.db'}", target)
    else:
        database = new_database(request.getfixturevalue("postgresql_url"))
        made = RelaySecured(secured, user, prefix, database.url, target)
    yield made
    made.open.close()


def send_in_turn(store: SecuredStore, topics: list[str], first: int, count: int) -> None:
    for number in range(first, first + count):
        for topic in topics:
            store.send(topic, KEYS[number % len(KEYS)], b"%d" % number)


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is held is tried again every second, in place of at growing intervals."""
    monkeypatch.setattr(target_quarantine, "_LAST_S", 1.0)


def test_a_target_that_may_not_be_written_holds_its_own_messages_and_no_others(
    store: SecuredStore, secured: DevBroker, target: str, new_secured_topic: NewTopic
) -> None:
    forbidden = new_secured_topic()
    give(secured, store.user, on_topic(forbidden, "describe", "write"))
    holds_its_own(store, target, forbidden)


@pytest.mark.parametrize("store", ["kafka"], indirect=True)
def test_a_target_that_may_not_even_be_seen_is_told_by_the_right_that_is_missing(
    store: SecuredStore, secured: DevBroker, target: str, new_secured_topic: NewTopic
) -> None:
    forbidden = new_secured_topic()
    give(secured, store.user, on_topic(forbidden, "write"))
    holds_its_own(store, target, forbidden)


def holds_its_own(store: SecuredStore, target: str, forbidden: str) -> None:
    """Take the right to write to one of two targets, send to both in turn, and give it again."""
    secured = store.broker
    send_in_turn(store, [target, forbidden], 0, 3)
    wait_until(lambda: store.statistics().committed == 6, ANSWER_S)
    take(secured, store.user, on_topic(forbidden, "write"))

    send_in_turn(store, [target, forbidden], 3, 12)
    wait_until(lambda: store.statistics().committed >= 6 + 12, ANSWER_S)
    held = [one for one in store.pending() if one.topics == (forbidden,)]
    assert len(held) == 12

    def reason() -> str:
        first = store.pending()[0].waits_for
        return first if "lacks" in first else ""

    text = wait_until(reason, ANSWER_S)
    assert forbidden in text
    assert f"User:{store.user.name} lacks the right Write on topic {forbidden}" in text
    assert f"--operation Write --topic '{forbidden}'" in text

    give(secured, store.user, on_topic(forbidden, "write"))
    wait_until(lambda: store.statistics().committed == 30 and not store.pending(), ANSWER_S)
    numbers = {key: [b"%d" % one for one in range(15) if KEYS[one % len(KEYS)] == key] for key in KEYS}
    assert committed(secured, forbidden) == numbers
    assert committed(secured, target) == numbers
