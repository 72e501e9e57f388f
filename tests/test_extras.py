"""What works with the four packages that penstock depends on, and what is said where an extra is missing."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import penstock

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
import penstock
from penstock.consumer import handler
from penstock.testing import TestApp

app = penstock.App("shop", bootstrap_servers="127.0.0.1:9092")
handled = []

@app.handler("orders")
def ship(order: penstock.Message) -> None:
    handled.append(order.value)

with TestApp(app) as test:
    test.send("orders", b"order 1", key=b"alice")
    test.settle()
consumer = penstock.LitePushConsumer("shop", {"orders": handler(ship)}, bootstrap_servers="127.0.0.1:9092")
producer = penstock.TransactionalProducer("till", bootstrap_servers="127.0.0.1:9092")
coordinator = penstock.Coordinator(bootstrap_servers="127.0.0.1:9092")
print(handled, app.effective["workers"])
"""


def run_alone(program: str) -> subprocess.CompletedProcess[str]:
    """Run a program as if only penstock's dependencies were installed."""
    names = {"penstock", *(re.split(r"[^\w-]", one)[0].replace("-", "_") for one in PROJECT["dependencies"])}
    return subprocess.run(
        [sys.executable, "-c", f"NAMES = {names}\n{ALONE}\n{program}"],
        env={**os.environ, "PENSTOCK_WORKERS": "3"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_the_package_and_the_module_have_one_version() -> None:
    assert PROJECT["version"] == penstock.__version__


def test_a_library_user_installs_four_packages() -> None:
    names = {re.split(r"[^\w-]", one)[0] for one in PROJECT["dependencies"]}

    assert names == {"confluent-kafka", "sortedcontainers", "tenacity", "xxhash"}


def test_apps_producers_coordinators_and_settings_need_no_extra() -> None:
    done = run_alone(LIBRARY)

    assert done.stdout == "[b'order 1'] 3\n", done.stderr


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
