"""Commands for development: an app that restarts, options on the command line, completion, a broker."""

from __future__ import annotations

import os
import signal
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka.admin import AdminClient

from canary import processes_that_show
from commands import Command
from penstock.cli.run import run_again_on_change
from settings_tools import clean_settings


def test_what_starts_an_app_again_and_how_it_ends(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    watchfiles = pytest.importorskip("watchfiles", reason="no watchfiles (penstock[reload]): nothing restarts")
    given: dict[str, Any] = {}
    monkeypatch.setattr(watchfiles, "run_process", lambda folder, **options: given.update(folder=folder, **options))

    assert run_again_on_change("shop:app", ["--http=127.0.0.1:1"], tmp_path) == 0

    counts = given["watch_filter"]
    changes = ("shop.py", "penstock.toml", "notes.txt", ".git/hooks/a.py", "seen.pyc")
    added = watchfiles.Change.added
    assert [counts(added, str(tmp_path / name)) for name in changes] == [True, True, False, False, False]
    assert given["target"] == f"{sys.executable} -P -m penstock run shop:app --http=127.0.0.1:1"
    assert given["sigint_timeout"] > 25  # an app's own time to drain


def test_an_app_that_starts_again_keeps_its_page(penstock_command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[object] = []
    monkeypatch.setattr("penstock.cli.run.run_again_on_change", lambda *of: given.extend(of) or 0)

    outcome = penstock_command(
        "run", "shop:app", "--reload", "--http", "a:1", "--handler-limit", "9", "--show-messages"
    )

    assert outcome.code == 0
    assert given == ["shop:app", ["--http=a:1", "--handler-limit=9.0", "--show-messages"]]


def test_the_command_line_sets_options_of_the_app(
    penstock_command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clean_settings(monkeypatch, tmp_path)
    (tmp_path / "set_shop.py").write_text(
        "import penstock\napp = penstock.App('shop', bootstrap_servers='a:1', config={'sasl.password': 'canary'})\n"
        "raise ValueError(app.bootstrap_servers, app.effective['workers'], app.effective['config']['client.id'])\n"
    )

    options = ("--bootstrap-servers", "b:2", "--set", "workers=3", "--config", "client.id=x")
    outcome = penstock_command("run", "set_shop:app", *options)
    wrong = penstock_command("run", "set_shop:app", "--set", "worker=3")

    assert "('b:2', 3, 'x')" in outcome.err
    assert "the command line: worker is no setting; did you mean workers?" in wrong.err
    assert "PENSTOCK_COMMAND_LINE" not in os.environ


def test_commands_complete(penstock_command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_PENSTOCK_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "penstock off")
    monkeypatch.setenv("COMP_CWORD", "1")

    outcome = penstock_command()

    assert outcome.out.split() == ["offsets"]


@pytest.mark.thorough  # it starts a Kafka; tests/devbroker has what that does without the command
def test_the_secured_broker_command_writes_its_settings_for_its_owner_alone_and_ends_in_order_at_sigterm(
    tmp_path: Path,
) -> None:
    options = ["--port", "0", "--data-dir", "kept", "--security", "sasl_ssl", "--acls"]
    command = [sys.executable, "-m", "penstock", "broker", *options]
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            address = process.stdout.readline().split()[-1]
            printed = process.stdout.readline()
            file = Path(printed.removeprefix("  settings: ").partition(",")[0])
            settings = dict(line.split("=", 1) for line in file.read_text().splitlines())
            password = settings["sasl.password"]
            shown = processes_that_show(password)

            topics = AdminClient(settings).list_topics(timeout=60).topics
            process.send_signal(signal.SIGTERM)
            code = process.wait(60)
        finally:
            process.kill()

    assert code == 0
    assert file.parent == tmp_path / "kept"
    assert stat.S_IMODE(file.stat().st_mode) == stat.S_IRUSR | stat.S_IWUSR
    assert settings["bootstrap.servers"] == address
    assert "__transaction_state" in topics  # which an administrator sees
    assert shown == []
    assert password not in printed + (file.parent / "broker.log").read_text()
