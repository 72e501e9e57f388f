"""The Kafka client's own log lines: the first of a kind at once, the others rationed and counted."""

from __future__ import annotations

import logging

import pytest

from penstock.clients import factory as making
from penstock.clients import producer
from penstock.clients.client_log import EVERY_S, ClientLog
from penstock.clients.factory import AdminClient, Consumer, Producer
from waiting import wait_until

LINE = "%s [%s] %s"


def refused(port: int, after_ms: int, node: str = "bootstrap") -> tuple[str, str, str]:
    broker = f"127.0.0.1:{port}/{node}"
    why = f"Connect to ipv4#127.0.0.1:{port} failed: Connection refused (after {after_ms}ms in state CONNECT)"
    return "FAIL", "rdkafka#producer-1", f"[thrd:{broker}]: {broker}: {why}"


def test_lines_that_say_the_same_of_a_broker_come_once_in_a_while_with_the_count_of_the_rest(
    caplog: pytest.LogCaptureFixture,
) -> None:
    now = [0.0]
    log = ClientLog(logging.getLogger("penstock.kafka"), lambda: now[0])

    with caplog.at_level(logging.DEBUG, "penstock.kafka"):
        for number in range(50):
            log.log(logging.ERROR, LINE, *refused(9092, number))
            log.log(logging.ERROR, LINE, *refused(9093, number))
        log.log(
            logging.ERROR, LINE, "FAIL", "rdkafka#consumer-2", "127.0.0.1:9092/1: Disconnected (after 5ms in state UP)"
        )
        now[0] = EVERY_S
        log.log(logging.ERROR, LINE, *refused(9092, 3))

    assert [(line.count("9092") > 0, "more like it" in line) for line in caplog.messages] == [
        (True, False),
        (False, False),
        (True, False),
        (True, True),
    ]
    assert "Disconnected" in caplog.messages[2]
    assert caplog.messages[3].endswith("(and 49 more like it, left out)")


@pytest.mark.parametrize(("name", "level"), [("ILLEGAL_GENERATION", "INFO"), ("FENCED_INSTANCE_ID", "ERROR")])
def test_a_transaction_that_a_rebalance_refuses_is_routine(
    name: str, level: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "penstock.kafka")
    said = f"Current transaction failed in state InTransaction: Failed to commit offsets ({name})"

    ClientLog(logging.getLogger("penstock.kafka")).log(logging.ERROR, LINE, "TXNERR", "rdkafka#producer-1", said)

    assert [line.levelname for line in caplog.records] == [level]


def test_clients_come_back_soon_after_a_brokers_return_unless_the_user_says_otherwise() -> None:
    def settings(config: dict[str, object]) -> dict[str, object]:
        return making.settings(Consumer, "127.0.0.1:9092", config)

    assert settings({})["reconnect.backoff.max.ms"] == 1000
    assert settings({"reconnect.backoff.max.ms": 5})["reconnect.backoff.max.ms"] == 5
    # The client library refuses a first wait that is longer than the longest.
    assert "reconnect.backoff.max.ms" not in settings({"reconnect.backoff.ms": 2000})


def test_an_admin_client_that_waits_for_a_broker_which_is_down_connects_to_it_with_pauses() -> None:
    # With sparse connections it has none, and uses a core.
    assert making.settings(AdminClient, "127.0.0.1:9092", {})["enable.sparse.connections"] is False


def test_a_producer_waits_ten_seconds_for_a_broker_that_froze_and_a_transactional_one_as_its_transactions() -> None:
    def settings(config: dict[str, object]) -> dict[str, object]:
        return making.settings(Producer, "127.0.0.1:9092", config)

    assert settings({})["socket.timeout.ms"] == 10_000
    assert settings({"socket.timeout.ms": 5000})["socket.timeout.ms"] == 5000
    # The client library refuses one that is longer than transactions may take, and has a default for it.
    assert "socket.timeout.ms" not in settings({"transactional.id": "any"})


def test_a_broker_that_is_away_costs_few_lines_however_many_clients_ask_for_it(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    class Counting(ClientLog):
        said = 0

        def log(self, level: int, text: str, /, *arguments: object) -> None:
            self.said += 1
            super().log(level, text, *arguments)

    log = Counting(logging.getLogger("penstock.kafka"))
    monkeypatch.setattr(making, "client_log", log)
    clients = [producer("127.0.0.1:1", {}) for _ in range(5)]

    def refused_often() -> bool:
        for client in clients:
            client.poll(0.01)
        return log.said >= 20

    wait_until(refused_often)

    assert 0 < len(caplog.messages) <= 4
    assert all("127.0.0.1:1" in line for line in caplog.messages)
