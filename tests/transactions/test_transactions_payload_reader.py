"""Payloads are read in a thread of their own, which can be left behind, and of no log but the one that was read."""

from __future__ import annotations

import threading

import pytest

from penstock.clients.bounded_calls import LeftBehind
from penstock.transactions.coordinator.logs import payload_reader
from penstock.transactions.coordinator.logs.log_bounds import Bounds, Look
from penstock.transactions.coordinator.logs.log_identity import DONE, HALF
from penstock.transactions.coordinator.logs.payload_reader import PayloadReader, PayloadsNotReadError, Read, Wanted
from penstock.transactions.wire.topics import StoreTopics
from waiting import wait_until


class Owner:
    """Somebody for whom payloads are read."""


def wanted(partition: int = 0, ids: dict[str, str] | None = None) -> Wanted:
    return Wanted(partition, frozenset({1}), {}, ids or {})


@pytest.fixture
def reader() -> PayloadReader:
    return PayloadReader("localhost:1", {}, StoreTopics("store"), LeftBehind("a test"))


def read_of(reader: PayloadReader, owner: Owner) -> Read:
    """Wait for what was read."""
    found: list[Read] = []

    def take() -> bool:
        read = reader.take(owner)
        found.extend([] if read is None else [read])
        return read is not None

    wait_until(take, 20)
    return found[0]


def test_a_read_that_hangs_is_left_behind_and_the_next_one_has_a_thread_of_its_own(
    reader: PayloadReader, monkeypatch: pytest.MonkeyPatch
) -> None:
    hangs, left = threading.Event(), reader._left
    monkeypatch.setattr(payload_reader, "_LIMIT_S", 0.2)
    monkeypatch.setattr(payload_reader, "_read", lambda *_: hangs.wait(60) and Read())
    owner = Owner()
    assert reader.read(owner, wanted())
    assert reader.take(owner) is None, "the coordinator's loop does not wait"
    assert not reader.read(Owner(), wanted(1)), "one after another"

    assert read_of(reader, owner) == Read(), "nothing came of it"
    assert left.hanging == 1
    found = Read(gone={1})
    monkeypatch.setattr(payload_reader, "_read", lambda *_: found)
    wait_until(lambda: reader.read(owner, wanted()), 20)
    assert read_of(reader, owner) is found

    hangs.set()
    wait_until(lambda: not left.hanging, 20)
    reader.close()


@pytest.mark.parametrize("log", [HALF, DONE])
def test_nothing_is_read_of_a_topic_that_was_made_again(log: str) -> None:
    bounds = {(log, 0): Bounds(0, 9)}

    def look(ids: dict[str, str], failures: dict[str, str] | None = None) -> Look:
        return Look(0.0, bounds, ids, failures or {})

    with pytest.raises(PayloadsNotReadError, match=f"the {log} topic was made again"):
        payload_reader._bounds(look({log: "new"}), log, wanted(ids={log: "old"}))
    with pytest.raises(PayloadsNotReadError, match="no answer"):
        payload_reader._bounds(look({}, {"store": "no answer"}), log, wanted(ids={log: "old"}))
    assert payload_reader._bounds(look({log: "old"}), log, wanted(ids={log: "old"})) == Bounds(0, 9)
    assert payload_reader._bounds(look({}), log, wanted()) == Bounds(0, 9), "brokers that know of no topic ids"
