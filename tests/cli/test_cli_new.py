"""A project that `penstock new` lays out: its test passes, `penstock check` finds it well, and it runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from commands import Command
from deploy_tools import command_of, instructions, require_app, require_command, stage
from kafka_tools import read_all
from penstock import clients
from penstock.devbroker import DevBroker
from settings_tools import clean_settings
from stalls import running
from waiting import wait_until

ROOT = Path(__file__).parents[2]
#: What the manifests of `deploy` rely on, in the image that they start.
FITTING = ("ENTRYPOINT", "USER", "EXPOSE", "WORKDIR", "STOPSIGNAL", "HEALTHCHECK")


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    clean_settings(monkeypatch, tmp_path)
    return tmp_path


def test_a_new_project_passes_its_test_is_checked_gets_its_topics_and_runs(
    folder: Path, penstock_command: Command, broker: DevBroker, monkeypatch: pytest.MonkeyPatch
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
    settings = f'bootstrap_servers = "{broker.bootstrap_servers}"\nworkers = 2\nconfig = {{acks = "all"}}\n'
    (project / "penstock.toml").write_text(settings)
    absent = penstock_command("check", "app:app", "--json")
    made_topics = penstock_command("topics", "create", "app:app", "--all")
    wait_until(lambda: penstock_command("check", "app:app").code == 0)
    checked = penstock_command("check", "app:app")

    assert made.code == 0
    assert "next: cd order-worker" in made.out
    assert own.returncode == 0, own.stdout
    assert absent.code == 1
    assert "no topic order-worker.accepted" in absent.err
    assert "penstock topics create MODULE:APP --all" in absent.err
    assert made_topics.code == 0, made_topics.err
    found = json.loads(absent.out)
    for setting, value in (("workers", "2"), ("config['acks']", "all")):
        assert {"name": setting, "value": value, "origin": "penstock.toml"} in found["settings"]
    # Scripts read the words of `kafka-acls`.
    fields = {"operation": "Read", "resource": "group", "name": "order-worker", "prefix": False}
    assert fields.items() <= next(row for row in found["rights"] if row["resource"] == "group").items()
    assert ("dlq.orders", "made at the start") in [(row["topic"], row["state"]) for row in found["topics"]]
    assert "dlq.orders" in checked.out

    with running(project, "app:app") as process:
        producer = clients.producer(broker.bootstrap_servers, {})
        producer.produce("orders", json.dumps({"id": 1, "amount": 5}), key="a")
        assert producer.flush(30) == 0
        wait_until(lambda: bool(read_all(broker.bootstrap_servers, "order-worker.accepted")), interval=0.3)
    assert process.returncode == 0


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


@pytest.mark.parametrize("name", ["Orders", "1st", "a b", "../a", "", "there"])
def test_a_name_that_is_none_or_of_what_is_there_is_refused_and_nothing_written(
    penstock_command: Command, folder: Path, name: str
) -> None:
    (folder / "there").mkdir()

    outcome = penstock_command("new", name)

    assert outcome.code == 2
    assert ("exists already" if name == "there" else "lower-case letters, digits and hyphens") in outcome.err
    assert list(folder.rglob("*")) == [folder / "there"]
