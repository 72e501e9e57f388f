from __future__ import annotations

import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient

from commands import Command
from penstock import clients
from penstock.clients.requests.topics import TopicSpec, ensure_topics, partition_counts
from penstock.devbroker import DevBroker
from waiting import wait_until

APP = """
from pathlib import Path
import penstock.app

app = penstock.app.App("{group}", bootstrap_servers="{servers}", workers=2)
not_an_app = 1

@app.handler("{topic}")
def handle(message):
    with Path("handled").open("ab") as file:
        file.write(message.value + b"\\n")
"""


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


def _command_line(file: Path) -> bytes:
    try:
        return file.read_bytes()
    except OSError:  # that process has just ended
        return b""


def write_app(folder: Path, servers: str, topic: str) -> None:
    (folder / "shop.py").write_text(APP.format(group=f"group-of-{topic}", servers=servers, topic=topic))


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
        command_lines = [_command_line(one) for one in Path("/proc").glob("[0-9]*/cmdline")]

        topics = AdminClient(settings).list_topics(timeout=60).topics
        process.send_signal(signal.SIGINT)
        code = process.wait(60)

    assert code == 0
    assert file.parent == tmp_path / "kept"
    assert stat.S_IMODE(file.stat().st_mode) == stat.S_IRUSR | stat.S_IWUSR
    assert settings["bootstrap.servers"] == address
    assert "__transaction_state" in topics  # which an administrator sees
    assert any(str(process.pid).encode() in line for line in command_lines)  # of the supervisor
    assert not any(password.encode() in line for line in command_lines)
    assert password not in printed + (file.parent / "broker.log").read_text()


def test_the_broker_command_refuses_rights_without_users(penstock_command: Command) -> None:
    ended = penstock_command("broker", "--port", "0", "--acls")

    assert ended.code == 2
    assert "give security= too" in ended.err


def test_the_broker_command_says_where_it_is_and_ends_in_order_at_sigterm(tmp_path: Path) -> None:
    with command("broker", "--port", "0", "--data-dir", "kept", folder=tmp_path) as process:
        assert process.stdout is not None
        address = process.stdout.readline().split()[-1]
        ensure_topics(clients.admin(address, {}), address, [TopicSpec("kept", 1)])

        process.send_signal(signal.SIGTERM)
        code = process.wait(60)

    assert code == 0
    with DevBroker(data_dir=tmp_path / "kept") as again:
        assert "kept" in partition_counts(clients.admin(again.bootstrap_servers, {}), again.bootstrap_servers)


def test_a_broker_that_dies_ends_its_command_with_an_error(tmp_path: Path) -> None:
    with command("broker", "--port", "0", "--data-dir", "kept", folder=tmp_path) as process:
        assert process.stdout is not None
        process.stdout.readline()
        supervisors = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        javas = Path(f"/proc/{supervisors[0]}/task/{supervisors[0]}/children").read_text().split()

        subprocess.run(["kill", "-9", javas[0]], check=True)
        _, errors = process.communicate(timeout=90)

    assert process.returncode == 1
    assert "ended by itself" in errors


def test_an_app_of_the_current_folder_runs_until_sigterm(
    tmp_path: Path, broker: DevBroker, new_topic: Callable[..., str]
) -> None:
    topic = new_topic()
    write_app(tmp_path, broker.bootstrap_servers, topic)
    producer = Producer({"bootstrap.servers": broker.bootstrap_servers, "enable.idempotence": True})
    producer.produce(topic, b"one", key=b"k")
    assert producer.flush(60) == 0

    with command("run", "shop:app", folder=tmp_path) as process:
        wait_until((tmp_path / "handled").exists, timeout=60)
        process.send_signal(signal.SIGTERM)
        code = process.wait(60)

    assert code == 0
    assert (tmp_path / "handled").read_bytes() == b"one\n"


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("shop", "MODULE:APP"),
        ("nowhere:app", "no module nowhere"),
        ("shop:nothing", "has no 'nothing'"),
        ("shop:not_an_app", "not a penstock.App"),
        ("broken:app", "ZeroDivisionError"),
    ],
)
def test_an_app_that_cannot_be_run_says_why(tmp_path: Path, target: str, says: str) -> None:
    write_app(tmp_path, "127.0.0.1:1", "orders")
    (tmp_path / "broken.py").write_text("1 / 0\n")

    with command("run", target, folder=tmp_path) as process:
        _, errors = process.communicate(timeout=90)

    assert process.returncode == 2, errors
    assert says in errors
    assert "Traceback" not in errors


def test_without_a_broker_an_app_and_a_coordinator_end_with_code_3(tmp_path: Path) -> None:
    write_app(tmp_path, "127.0.0.1:1", "orders")

    with (
        command("run", "shop:app", folder=tmp_path) as app,
        command("coordinator", "--bootstrap-servers", "127.0.0.1:1", folder=tmp_path) as coordinator,
    ):
        for process in (app, coordinator):
            _, errors = process.communicate(timeout=90)

            assert process.returncode == 3, errors
            assert "127.0.0.1:1" in errors
            assert "Traceback" not in errors


def test_a_coordinator_runs_until_a_signal(tmp_path: Path, broker: DevBroker) -> None:
    with command(
        "coordinator", "--bootstrap-servers", broker.bootstrap_servers, "--prefix", "cli-test", folder=tmp_path
    ) as process:
        assert process.stdout is not None
        line = process.stdout.readline()

        process.send_signal(signal.SIGTERM)
        code = process.wait(60)

    assert "cli-test" in line
    assert code == 0
