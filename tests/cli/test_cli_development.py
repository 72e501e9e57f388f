"""What makes the command line pleasant: an app that starts again, tables that fit, names that complete."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from commands import Command
from penstock.cli.output import Result, Table, show
from penstock.cli.run import run_again_on_change
from settings_tools import clean_settings


def printed(capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Return the lines that were printed, without what makes them bold."""
    return re.sub("\x1b\\[[0-9;]*m", "", capsys.readouterr().out).splitlines()


ROWS = [("orders-of-the-year", "1000", "17"), ("a", "2", "")]


def print_rows(rows: Sequence[Sequence[str]]) -> None:
    names = ("topic", "committed", "done_above")
    show(Result([Table("partitions", [dict(zip(names, row, strict=True)) for row in rows])]), as_json=False)


def test_what_starts_an_app_again_and_how_it_ends(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    watchfiles = pytest.importorskip("watchfiles")
    given: dict[str, Any] = {}
    monkeypatch.setattr(watchfiles, "run_process", lambda folder, **options: given.update(folder=folder, **options))

    assert run_again_on_change("shop:app", ["--http=127.0.0.1:1"], tmp_path) == 0

    counts = given["watch_filter"]
    changes = ("shop.py", "penstock.toml", "notes.txt", ".git/hooks/a.py", "seen.pyc")
    added = watchfiles.Change.added
    assert [counts(added, str(tmp_path / name)) for name in changes] == [True, True, False, False, False]
    assert given["target"] == f"{sys.executable} -m penstock run shop:app --http=127.0.0.1:1"
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


def test_a_table_fits_the_terminal_and_a_row_into_a_pipe_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "20")
    print_rows([("x" * 300, "1", "y z " * 100)])
    piped = printed(capsys)
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("NO_COLOR", "1")
    shown = {}
    for columns in (100, 40, 25):
        monkeypatch.setenv("COLUMNS", str(columns))
        print_rows(ROWS)
        shown[columns] = printed(capsys)

    assert len(piped) == 2
    assert all(len(line) <= columns for columns in (100, 40) for line in shown[columns])
    assert shown[25][:3] == ["topic       orders-of-the-year", "committed   1000", "done above  17"]


def test_commands_complete(penstock_command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_PENSTOCK_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "penstock off")
    monkeypatch.setenv("COMP_CWORD", "1")

    outcome = penstock_command()

    assert outcome.out.split() == ["offsets"]
