"""The pages of the five jobs are correct: their programs and commands run in order, on the Kafka of the run."""

from __future__ import annotations

import random
import socket
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from pages import ROOT, blocks
from terminal import terminal

from databases import new_database
from penstock.devbroker import DevBroker

JOBS = ROOT / "docs" / "jobs"
#: Seconds for a page that starts Spark three times, on a busy machine.
SPARK_S = 1200


def names(new_name: Callable[..., str], *topics: str, app: str) -> dict[str, str]:
    """Give the topics and the app of a page names that no other test uses."""
    group = new_name(app)
    topics_here = {name: name.replace(name.strip('"'), new_name(name.strip('"'))) for name in topics}
    return topics_here | {f'"{app}"': f'"{group}"', f"lag {app}": f"lag {group}"}


@pytest.fixture
def given(broker: DevBroker) -> dict[str, str]:
    """The address of Kafka, as the pages have it."""
    return {"127.0.0.1:9092": broker.bootstrap_servers}


def test_messages_of_a_key_are_handled_in_order_and_dead_letters_replayed(
    tmp_path: Path, given: dict[str, str], new_name: Callable[..., str]
) -> None:
    given |= names(new_name, "balance-changes", app="sms")
    (tmp_path / "broker.log").write_text(f"Kafka runs at {given['127.0.0.1:9092']}\n")  # the run's, which runs already

    with terminal(tmp_path, given, started=("penstock broker",)) as reader:
        reader.follow(blocks(JOBS / "in-order.md"))

        assert reader.ran > 10


def test_each_trip_has_one_invoice_though_the_app_was_killed(
    tmp_path: Path, given: dict[str, str], new_name: Callable[..., str]
) -> None:
    given |= names(new_name, '"trips"', '"invoices"', app="billing")

    with terminal(tmp_path, given, started=("penstock broker",)) as reader:
        reader.follow(blocks(JOBS / "results.md"))

        assert reader.ran > 7


def test_each_order_has_one_delivery_after_any_crash(
    tmp_path: Path, given: dict[str, str], new_name: Callable[..., str], postgresql_url: str
) -> None:
    prefix = new_name("shop")
    given |= names(new_name, '"orders"', app="warehouse")
    given |= {"--prefix shop": f"--prefix {prefix}", 'prefix="shop"': f'prefix="{prefix}"'}
    given |= {"postgresql://shop@127.0.0.1/shop": new_database(postgresql_url).url.replace("+psycopg", "")}

    with terminal(tmp_path, given, started=("penstock broker",)) as reader:
        reader.follow(blocks(JOBS / "orders.md"))

        assert reader.ran > 15


@pytest.mark.timeout(SPARK_S)
def test_each_sale_counts_once_in_postgresql_though_the_checkpoint_is_lost(
    tmp_path: Path, given: dict[str, str], new_name: Callable[..., str], postgresql_url: str
) -> None:
    given |= {"book-sales": new_name("book-sales")}
    given |= {"postgresql://shop@127.0.0.1/shop": new_database(postgresql_url).url.replace("+psycopg", "")}

    with terminal(tmp_path, given, started=("penstock broker",)) as reader:
        reader.follow(blocks(JOBS / "totals.md"))

        assert reader.ran > 8


def test_an_app_goes_live_on_a_secured_kafka_and_is_freed_of_what_hangs(tmp_path: Path) -> None:
    # The second process of the page listens on the port after that of the first.
    first, _, kafka = free_ports(3)
    ports = {"8400": str(first), "9093": str(kafka)}

    with terminal(tmp_path, ports) as reader:
        reader.follow(blocks(JOBS / "night.md"))

        assert reader.ran > 15


def free_ports(count: int) -> list[int]:
    """Find free ports in a row, below those that Linux chooses for connections."""
    while True:
        first = random.randrange(27_000, 32_000)  # noqa: S311 - a port is no secret
        ports = list(range(first, first + count))
        with ExitStack() as opened, suppress(OSError):
            for port in ports:
                opened.enter_context(socket.create_server(("127.0.0.1", port)))
            return ports
