"""A process with an app that stalls in every possible way, for tests of the named causes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from penstock import clients

APP = """
import time
from pathlib import Path
import penstock
from tenacity import wait_fixed

app = penstock.App(
    "{name}", bootstrap_servers="{servers}", workers=4, report=penstock.ReportSettings(topic="{reports}"),
    config={{"message.timeout.ms": 1000, "topic.metadata.refresh.interval.ms": 300}},
)

@app.handler("{hung}")
def hangs(message):
    while not Path("go on").exists():  # until the test says so
        time.sleep(0.02)

@app.handler("{poison}", retry=penstock.retry(attempts=1000, wait=wait_fixed(3600)))
def fails(message):
    if message.key == b"poison key":
        raise RuntimeError("a secret text")

@app.handler(
    "{refused}", on_failure="dead_letter", dead_letter_topic="{letters}", retry=penstock.retry(attempts=1)
)
def gives_up(message):
    raise RuntimeError("a secret text")

@app.handler("{held_back}")
def waits_for_others(message):
    pass
"""


@contextmanager
def running(folder: Path, target: str = "shop:app", *options: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run an app with `penstock run`, and end it in order."""
    command = [sys.executable, "-m", "penstock", "run", target, *options]
    with subprocess.Popen(command, cwd=folder) as process:
        try:
            yield process
        finally:
            (folder / "go on").touch()
            process.terminate()
            try:
                process.wait(60)
            finally:
                process.kill()


@contextmanager
def open_transaction(bootstrap_servers: str, topic: str) -> Iterator[None]:
    """Keep a transaction open that has written to a topic."""
    # The broker would abort it after a minute, which is less than a busy machine may take to name it.
    settings = {"transactional.id": f"{topic}-foreign", "transaction.timeout.ms": 600_000}
    producer = clients.producer(bootstrap_servers, settings)
    producer.init_transactions(60)
    producer.begin_transaction()
    producer.produce(topic, b"not committed yet")
    producer.flush(30)
    try:
        yield
    finally:
        producer.abort_transaction(60)
