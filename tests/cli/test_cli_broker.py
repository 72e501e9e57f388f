"""`penstock broker` as a process: what it says, how it ends, and what it shows of its passwords."""

from __future__ import annotations

import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from confluent_kafka.admin import AdminClient

from canary import processes_that_show


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
