"""Functions that work with penstock's four dependencies alone, and the errors for a missing extra."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

import penstock
from kafka_tools import produce
from penstock.devbroker import DevBroker

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]

#: Refuses every import but those of Python, of penstock and of its dependencies.
ALONE = """
import sys

class Refusal:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in {*sys.stdlib_module_names, *NAMES}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Refusal())
"""
LIBRARY = """
import threading
import penstock
from penstock.consumer import handler
from penstock.testing import TestApp

servers, topic = sys.argv[1:]
done = threading.Event()

def app_of(servers):
    app = penstock.App(topic, bootstrap_servers=servers, commit_interval=0.1)
    app.handler(topic, on_failure="dead_letter", retry=penstock.retry(attempts=2, wait=lambda _: 0.01))(ship)
    return app

def ship(order: penstock.Message) -> None:
    if order.value == b"bad":
        raise ValueError
    if order.value == b"last":
        done.set()

with TestApp(app_of("127.0.0.1:9092")) as test:
    test.send(topic, b"order 1", key=b"alice")
    test.settle()
    print(test.statistics().handled)
consumer = penstock.LitePushConsumer("shop", {"orders": handler(ship)}, bootstrap_servers="127.0.0.1:9092")
coordinator = penstock.Coordinator(bootstrap_servers="127.0.0.1:9092")
app = app_of(servers)
with app.start() as running:
    assert done.wait(60)
    with penstock.TransactionalProducer(topic, bootstrap_servers=servers, prefix=f"store.{topic}") as producer:
        producer.send(topic, value=b"in a transaction")
found = running.statistics()
print(found.handled, found.retried, found.dead_letters, found.commits > 0, app.effective["workers"])
"""


def run_alone(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a program as if only penstock's dependencies were installed."""
    names = {"penstock", *(re.split(r"[^\w-]", text)[0].replace("-", "_") for text in PROJECT["dependencies"])}
    return subprocess.run(
        [sys.executable, "-c", f"NAMES = {names}\n{ALONE}\n{program}", *arguments],
        env={**os.environ, "PENSTOCK_WORKERS": "3"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_the_package_and_the_module_have_one_version() -> None:
    assert PROJECT["version"] == penstock.__version__


def test_a_library_user_installs_four_packages() -> None:
    names = {re.split(r"[^\w-]", text)[0] for text in PROJECT["dependencies"]}

    assert names == {"confluent-kafka", "sortedcontainers", "tenacity", "xxhash"}


def test_apps_producers_coordinators_and_settings_need_no_extra(
    broker: DevBroker, new_topic: Callable[..., str]
) -> None:
    topic = new_topic()
    produce(broker.bootstrap_servers, topic, [(b"k", b"first"), (b"k", b"bad"), (b"k", b"last")])

    done = run_alone(LIBRARY, broker.bootstrap_servers, topic)

    assert done.stdout.splitlines() == ["1", "2 1 1 True 3"], done.stderr


@pytest.mark.parametrize(
    ("program", "extra"),
    [
        ("from penstock.cli import main\nmain()", "cli"),
        ("import penstock\npenstock.Telemetry()", "otel"),
        ("from penstock.telemetry import TraceIds", "otel"),
    ],
)
def test_what_needs_an_extra_names_it(program: str, extra: str) -> None:
    done = run_alone(program)

    assert done.returncode != 0
    assert f"pip install 'penstock[{extra}]'" in done.stderr.splitlines()[-1]
