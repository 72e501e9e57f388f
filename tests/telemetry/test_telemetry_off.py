"""Without a `Telemetry` nothing of it is on the way of a message: the code that would be called is not even loaded."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

from kafka_tools import produce
from penstock.devbroker import DevBroker

PROGRAM = """
import sys, threading
import penstock

servers, topic = sys.argv[1:]
app = penstock.App(topic, bootstrap_servers=servers, commit_interval=0.1)
done = threading.Event()

@app.handler(topic, on_failure="dead_letter", retry=penstock.retry(attempts=2, wait=lambda _: 0.01))
def handle(message):
    if message.value == b"bad":
        raise ValueError
    if message.value == b"last":
        done.set()

def check(half):
    return penstock.TransactionState.UNKNOWN

with app.start() as running:
    assert done.wait(60)
    with penstock.TransactionalProducer("off", bootstrap_servers=servers, check=check) as producer:
        with producer.transaction(topic, key=b"k", value=b"in a transaction"):
            pass
found = running.statistics()
assert (found.handled, found.retried, found.dead_letters) == (2, 1, 1), found
assert found.commits > 0
print(sorted(name for name in sys.modules if name.split(".")[0] == "opentelemetry" or "penstock.telemetry" in name))
"""


def test_messages_retries_dead_letters_commits_and_transactions_call_nothing_of_telemetry_where_it_is_off(
    broker: DevBroker, new_topic: Callable[..., str]
) -> None:
    topic = new_topic()
    produce(broker.bootstrap_servers, topic, [(b"k", b"first"), (b"k", b"bad"), (b"k", b"last")])

    ran = subprocess.run(
        [sys.executable, "-c", PROGRAM, broker.bootstrap_servers, topic],
        check=False,
        capture_output=True,
        text=True,
        timeout=120,
    )

    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines()[-1] == "[]"
