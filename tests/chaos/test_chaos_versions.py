"""The main ways on the version of Kafka that `--kafka` names: `make chaos ARGS="--kafka 3.9.1"`."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from commands import commands
from kafka_tools import read_all
from penstock import App, Coordinator, Message, Outgoing, TransactionalProducer
from penstock.devbroker import KAFKA_VERSION, DevBroker
from penstock.errors import PenstockError
from penstock.transactions import HalfMessage, TransactionState
from waiting import wait_until

pytestmark = pytest.mark.chaos

HELLO = Path(__file__).parents[2] / "examples" / "hello.py"


@pytest.fixture(scope="module")
def kafka() -> Iterator[DevBroker]:
    """A broker of that version."""
    with DevBroker() as running:
        yield running


def test_the_first_program_runs() -> None:
    done = subprocess.run([sys.executable, HELLO], capture_output=True, text=True, timeout=600, check=False)

    assert done.stdout.splitlines() == ["shipping b'order 1' for b'alice'", "shipping b'order 3' for b'alice'"]
    assert done.returncode == 0, done.stderr


def test_results_are_published_exactly_once_and_the_group_is_explained(
    kafka: DevBroker, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kafka.create_topic("orders", 3)
    kafka.create_topic("invoices", 3)
    app = App("shop", bootstrap_servers=kafka.bootstrap_servers, exactly_once=True)

    @app.handler("orders")
    def invoice(order: Message) -> Outgoing:
        return Outgoing("invoices", order.value, order.key)

    till = TransactionalProducer("till", bootstrap_servers=kafka.bootstrap_servers)
    with Coordinator(bootstrap_servers=kafka.bootstrap_servers), till, app.start() as running:
        for number in range(100):
            with till.transaction("orders", key=b"%d" % (number % 7), value=b"%d" % number):
                pass
        wait_until(lambda: len(read_all(kafka.bootstrap_servers, "invoices")) == 100, 120, 1)
        explained = str(running.explain())
    lag = commands(monkeypatch, capsys)("lag", "shop", "--bootstrap-servers", kafka.bootstrap_servers)

    seen = [int(message.value() or b"") for message in read_all(kafka.bootstrap_servers, "invoices")]
    assert sorted(seen) == list(range(100))
    assert "orders" in explained
    assert (lag.code, "orders" in lag.out) == (0, True), lag.err


def test_an_undecided_transaction_is_listed_checked_and_published(
    kafka: DevBroker, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kafka.create_topic("checked", 2)
    place = {"bootstrap_servers": kafka.bootstrap_servers, "prefix": "checked"}

    def check(half: HalfMessage) -> TransactionState:
        return TransactionState.COMMIT if half.key == b"yes" else TransactionState.ROLLBACK

    with TransactionalProducer("till", **place) as till:  # type: ignore[arg-type] # two texts
        for key in (b"yes", b"no"):
            till.send("checked", key=key, value=b"v", execute=lambda _: TransactionState.UNKNOWN)
        listed = commands(monkeypatch, capsys)(
            "tx", "ls", "--bootstrap-servers", kafka.bootstrap_servers, "--prefix", "checked"
        )
    with (
        TransactionalProducer("till", check=check, **place),  # type: ignore[arg-type] # as above
        Coordinator(**place, transaction_timeout=0.5, check_interval=0.5),  # type: ignore[arg-type] # as above
    ):
        wait_until(lambda: [one.key() for one in read_all(kafka.bootstrap_servers, "checked")] == [b"yes"], 120, 1)

    assert (listed.code, len(re.findall(r"till +checked", listed.out))) == (0, 2), listed


def test_members_of_the_newer_protocol_work_or_the_start_says_what_they_need(kafka: DevBroker) -> None:
    kafka.create_topic("newer")
    app = App("newer", bootstrap_servers=kafka.bootstrap_servers, config={"group.protocol": "consumer"})
    app.handler("newer")(lambda _message: None)

    if KAFKA_VERSION < "4":
        with pytest.raises(PenstockError, match=r"Kafka 4\.0"):
            app.start()
    else:
        with app.start() as running:
            wait_until(lambda: running.statistics().partitions)
