"""The output of a program without logging setup when its clients reach no broker."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress

import pytest

from kafka_proxy import KafkaProxy
from penstock.devbroker import DevBroker

#: A start that fails, as a user writes it.
PROGRAM = """
import sys
import penstock

app = penstock.App("shop", bootstrap_servers=sys.argv[1], config=dict([sys.argv[2:]] if sys.argv[2:] else []))

@app.handler("orders")
def ship(order: penstock.Message) -> None:
    "Do nothing."

try:
    app.start()
except penstock.PenstockError as error:
    sys.exit(f"ERROR {error}")
"""

#: A client that has reached its broker, and polls until its input ends.
CONNECTED = """
import sys, threading
from penstock import clients

client = clients.producer(sys.argv[1], {})
client.list_topics(timeout=60)
print("connected", flush=True)
over = threading.Event()
threading.Thread(target=lambda: (sys.stdin.read(), over.set()), daemon=True).start()
while not over.is_set():
    client.poll(0.1)
"""


def without_names_of_the_library(stderr: str) -> str:
    """Return the output. It names neither a client of the library nor old brokers."""
    for foreign in ("rdkafka#", "0.10", "%3|", "%4|", "%6|", "[thrd:", "FAIL"):
        assert foreign not in stderr
    return stderr


def start(*arguments: str) -> str:
    """Return the output of a start that fails."""
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments], capture_output=True, text=True, timeout=300, check=False
    )
    assert ended.returncode == 1, ended.stderr
    return without_names_of_the_library(ended.stderr)


@contextmanager
def listening() -> Iterator[str]:
    """Yield the address of what listens without TLS, and answers nothing that Kafka would."""
    with closing(socket.create_server(("127.0.0.1", 0))) as listener:

        def serve() -> None:
            with suppress(OSError):  # it was closed
                while True:
                    connection = listener.accept()[0]
                    with suppress(OSError):
                        connection.settimeout(5)
                        connection.recv(64)
                    connection.close()

        threading.Thread(target=serve, daemon=True).start()
        yield f"127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.thorough
def test_a_wrong_address_shows_its_cause() -> None:
    shown = start("127.0.0.1:1")

    assert "ERROR no Kafka broker answered at 127.0.0.1:1" in shown
    assert "Connection refused" in shown


def test_tls_against_plaintext_shows_what_to_change() -> None:
    with listening() as address:
        shown = start(address, "security.protocol", "ssl")

    assert f"ERROR no Kafka broker lets this client in at {address}" in shown
    assert "set security.protocol to PLAINTEXT" in shown


def test_a_broker_that_goes_away_is_a_warning_in_plain_words(broker: DevBroker) -> None:
    with KafkaProxy(broker.bootstrap_servers) as proxy:
        client = subprocess.Popen(
            [sys.executable, "-c", CONNECTED, proxy.bootstrap_servers],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert client.stdout is not None
        assert client.stdout.readline() == "connected\n"
    assert client.stderr is not None
    first = client.stderr.readline()
    _, rest = client.communicate(timeout=60)

    assert client.returncode == 0
    assert first.startswith("a Kafka client says: ")
    without_names_of_the_library(first + rest)
