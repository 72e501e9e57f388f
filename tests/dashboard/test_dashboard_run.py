"""`penstock run --http`: the endpoints of a process that runs an app, from before its start until after its end."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from commands import commands
from penstock.devbroker import DevBroker
from waiting import wait_until

APP = """
from penstock import App

app = App("{topic}", bootstrap_servers="{servers}")

@app.handler("{topic}")
def handle(message):
    pass
"""


def status(port: int, path: str) -> int | None:
    """Return the status of an answer; None where nobody answers."""
    with suppress(OSError):
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as answer:
                return int(answer.status)
        except urllib.request.HTTPError as error:
            return error.code
    return None


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def test_the_endpoints_come_and_go_with_the_process_and_do_not_change_how_it_ends(
    broker: DevBroker, new_topic: Callable[..., str], tmp_path: Path
) -> None:
    topic, port = new_topic(), free_port()
    (tmp_path / "shop.py").write_text(APP.format(topic=topic, servers=broker.bootstrap_servers))
    command = [sys.executable, "-m", "penstock", "run", "shop:app", "--http", f"127.0.0.1:{port}"]

    with subprocess.Popen(command, cwd=tmp_path, env={**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}) as process:
        try:
            wait_until(lambda: status(port, "/readyz") == 200, 90)
            answers = status(port, "/healthz"), status(port, "/metrics"), status(port, "/")
            process.send_signal(signal.SIGTERM)
            code = process.wait(60)
        finally:
            process.kill()

    assert (answers, code) == ((200, 200, 200), 0)
    assert status(port, "/healthz") is None


def test_a_wrong_address_or_limit_is_wrong_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "wrong_address_shop.py").write_text(APP.format(topic="t", servers="127.0.0.1:1"))
    monkeypatch.chdir(tmp_path)
    penstock = commands(monkeypatch, capsys)

    address = penstock("run", "wrong_address_shop:app", "--http", "8400")
    limit = penstock("run", "wrong_address_shop:app", "--http", "127.0.0.1:0", "--handler-limit", "-1")

    assert (address.code, "write HOST:PORT" in address.err) == (2, True)
    assert (limit.code, "handler limit must be a number above zero" in limit.err) == (2, True)
