"""A project that `penstock new` lays out: its test passes, `penstock check` finds it well, and it runs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from confluent_kafka.admin import AdminClient

from commands import Command
from deploy_tools import command_of, instructions, require_app, require_command, stage
from kafka_tools import read_all
from penstock import clients
from penstock.clients.topics import TopicSpec, ensure_topics
from penstock.devbroker import DevBroker
from settings_tools import clean_settings
from waiting import wait_until

ROOT = Path(__file__).parents[2]
#: What the manifests of `deploy` rely on, in the image that they start.
FITTING = ("ENTRYPOINT", "USER", "EXPOSE", "WORKDIR", "STOPSIGNAL", "HEALTHCHECK")


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    clean_settings(monkeypatch, tmp_path)
    return tmp_path


def test_a_new_project_passes_its_test_is_checked_and_runs(
    folder: Path, penstock_command: Command, broker: DevBroker, admin: AdminClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = penstock_command("new", "order-worker")
    project = folder / "order-worker"
    own = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        cwd=project,
        capture_output=True,
        text=True,
        check=False,
    )
    monkeypatch.chdir(project)
    monkeypatch.delitem(sys.modules, "app", raising=False)
    (project / "penstock.toml").write_text(f'bootstrap_servers = "{broker.bootstrap_servers}"\nworkers = 2\n')
    ensure_topics(admin, broker.bootstrap_servers, [TopicSpec("orders", 1, {})])
    absent = penstock_command("check", "app:app", "--json")
    ensure_topics(admin, broker.bootstrap_servers, [TopicSpec("order-worker.accepted", 1, {})])
    wait_until(lambda: penstock_command("check", "app:app").code == 0, timeout=30)
    checked = penstock_command("check", "app:app")

    assert made.code == 0
    assert "next: cd order-worker" in made.out
    assert own.returncode == 0, own.stdout
    assert absent.code == 1
    assert "no topic order-worker.accepted" in absent.err
    assert "penstock topics create" in absent.err
    assert {"name": "workers", "value": "2", "origin": "penstock.toml"} in json.loads(absent.out)["settings"]
    # Scripts read the words of `kafka-acls`.
    fields = {"operation": "Read", "resource": "group", "name": "order-worker", "prefix": False}
    assert fields.items() <= next(row for row in json.loads(absent.out)["rights"] if row["resource"] == "group").items()
    assert "dlq.orders" in checked.out
    assert "made at the start" in checked.out

    running = subprocess.Popen([sys.executable, "-m", "penstock", "run", "app:app"], cwd=project, env=dict(os.environ))
    try:
        producer = clients.producer(broker.bootstrap_servers, {})
        producer.produce("orders", json.dumps({"id": 1, "amount": 5}), key="a")
        assert producer.flush(30) == 0
        wait_until(lambda: bool(read_all(broker.bootstrap_servers, "order-worker.accepted")), timeout=60, interval=0.3)
        running.send_signal(signal.SIGTERM)
        assert running.wait(30) == 0
    finally:
        running.kill()
        running.wait()


def test_the_image_of_a_new_project_serves_probes_and_fits_the_manifests(
    folder: Path, penstock_command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    penstock_command("new", "order-worker")
    # As in the image, where penstock.toml lies in the working directory.
    monkeypatch.chdir(folder / "order-worker")
    project, own = folder / "order-worker", ROOT / "deploy" / "Dockerfile"
    made = stage(project / "Dockerfile")
    options = require_command(command_of(project / "Dockerfile"), {})
    (installed,) = [value for name, value in instructions(project / "Dockerfile") if "pip install" in value]
    kept = [name.removeprefix("!") for name in (project / ".dockerignore").read_text().split() if name != "*"]

    assert {name: made[name] for name in FITTING} == {name: stage(own)[name] for name in FITTING}
    assert options["http"] == f"0.0.0.0:{made['EXPOSE']}"
    assert require_app(options["target"], project, {}).name == "order-worker"
    assert made["COPY"].split() == [*kept, "./"]
    assert '"penstock[cli,otel,web,uvloop]"' in installed


@pytest.mark.parametrize("name", ["Orders", "1st", "a b", "../a", ""])
def test_a_name_that_is_none_is_refused(penstock_command: Command, folder: Path, name: str) -> None:
    outcome = penstock_command("new", name)

    assert outcome.code == 2
    assert "small letters, digits and hyphens" in outcome.err
    assert list(folder.iterdir()) == []


def test_what_is_there_is_left_alone(penstock_command: Command, folder: Path) -> None:
    (folder / "orders").mkdir()

    outcome = penstock_command("new", "orders")

    assert outcome.code == 2
    assert "is there already" in outcome.err
    assert list((folder / "orders").iterdir()) == []
