"""`penstock broker` as a process: what it says, how it ends, and what it shows of its passwords."""

from __future__ import annotations

import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from confluent_kafka.admin import AdminClient

from canary import processes_that_show
from penstock import clients
from penstock.clients.topics import TopicSpec, ensure_topics

pytestmark = pytest.mark.thorough  # each starts a Kafka; tests/devbroker has what it does without the command


@contextmanager
def command(*arguments: str, folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Run `penstock` as a process of its own, which ends with the block."""
    process = subprocess.Popen(
        [sys.executable, "-m", "penstock", *arguments],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_the_secured_broker_command_writes_its_settings_for_its_owner_alone_and_ends_in_order_at_sigint(
    tmp_path: Path,
) -> None:
    options = ["--port", "0", "--data-dir", "kept", "--security", "sasl_ssl", "--acls"]
    with command("broker", *options, folder=tmp_path) as process:
        assert process.stdout is not None
        address = process.stdout.readline().split()[-1]
        printed = process.stdout.readline()
        file = Path(printed.removeprefix("  settings: ").partition(",")[0])
        settings = dict(line.split("=", 1) for line in file.read_text().splitlines())
        password = settings["sasl.password"]
        shown = processes_that_show(password)

        topics = AdminClient(settings).list_topics(timeout=60).topics
        process.send_signal(signal.SIGINT)
        code = process.wait(60)

    assert code == 0
    assert file.parent == tmp_path / "kept"
    assert stat.S_IMODE(file.stat().st_mode) == stat.S_IRUSR | stat.S_IWUSR
    assert settings["bootstrap.servers"] == address
    assert "__transaction_state" in topics  # which an administrator sees
    assert shown == []
    assert password not in printed + (file.parent / "broker.log").read_text()


def test_the_broker_command_says_where_it_is_and_ends_in_order_at_sigterm(tmp_path: Path) -> None:
    with command("broker", "--port", "0", "--data-dir", "kept", folder=tmp_path) as process:
        assert process.stdout is not None
        address = process.stdout.readline().split()[-1]
        ensure_topics(clients.admin(address, {}), address, [TopicSpec("kept", 1)])

        process.send_signal(signal.SIGTERM)
        code = process.wait(60)

    assert code == 0
    assert (tmp_path / "kept").is_dir()
