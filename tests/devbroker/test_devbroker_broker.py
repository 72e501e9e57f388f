from __future__ import annotations

import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer

from penstock import clients
from penstock.clients.topics import partition_counts
from penstock.devbroker import DevBroker
from penstock.errors import ConfigurationError, DevBrokerError
from waiting import wait_until


def topics(broker: DevBroker) -> set[str]:
    address = broker.bootstrap_servers
    names = partition_counts(clients.admin(address, {}))
    return {name for name in names if not name.startswith("__")}


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_a_missing_topic_is_not_created_by_writing_to_it(broker: DevBroker) -> None:
    errors: list[object] = []
    producer = Producer({"bootstrap.servers": broker.bootstrap_servers, "message.timeout.ms": 2000, "log_level": 0})

    producer.produce("never-created", b"x", on_delivery=lambda error, _: errors.append(error))
    producer.flush(30)

    assert len(errors) == 1
    assert errors[0] is not None
    assert "never-created" not in topics(broker)


@pytest.mark.thorough
def test_a_broker_outlives_the_thread_that_started_it_and_once_killed_comes_back_on_its_port_with_its_topics() -> None:
    broker = DevBroker()
    starter = threading.Thread(target=broker.start)
    starter.start()
    starter.join()
    try:
        broker.create_topic("survivor")
        was_running, address, first_pid = broker.running, broker.bootstrap_servers, broker.pid

        broker.kill()
        gone = not broker.running and not alive(first_pid)
        with pytest.raises(DevBrokerError, match=r"has ended.*restart\(\) brings it back"):
            broker.freeze()
        broker.restart()

        assert was_running
        assert gone
        assert broker.bootstrap_servers == address
        assert broker.pid != first_pid
        assert "survivor" in topics(broker)
    finally:
        broker.stop()


@pytest.mark.thorough
def test_a_broker_that_cannot_start_shows_its_last_lines_and_leaves_its_folder_to_the_next_one_at_a_time(
    tmp_path: Path,
) -> None:
    folder = tmp_path / "kept ünd named oddly"
    refused = DevBroker(data_dir=folder, config={"num.network.threads": "none"})
    with pytest.raises(DevBrokerError, match=r"(?s)did not start.*num\.network\.threads"):
        refused.start()
    assert not refused.running

    with DevBroker(data_dir=folder) as first:
        first.create_topic("kept")
        with pytest.raises(DevBrokerError, match="another embedded broker uses the data folder"):
            DevBroker(data_dir=folder).start()

    with DevBroker(data_dir=folder) as second:
        found = topics(second)

    assert "kept" in found
    assert (folder / "kafka").is_dir()


def test_a_taken_port_is_named(broker: DevBroker) -> None:
    port = int(broker.bootstrap_servers.rpartition(":")[2])

    with pytest.raises(DevBrokerError, match=f"port {port} on 127.0.0.1 is taken"):
        DevBroker(port=port).start()


def test_the_jvm_takes_the_options_that_kafkas_own_scripts_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KAFKA_JVM_PERFORMANCE_OPTS", "-XX:+UseSerialGC -XX:+NoSuchThing")

    with pytest.raises(DevBrokerError, match="NoSuchThing"):
        DevBroker().start()


@pytest.mark.thorough
def test_a_broker_that_takes_too_long_is_given_up() -> None:
    slow = DevBroker(start_timeout=0.2)

    with pytest.raises(DevBrokerError, match="in time"):
        slow.start()

    assert not slow.running


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"config": {"log.dirs": "elsewhere"}}, r"log\.dirs"),
        ({"port": 70_000}, "port"),
        ({"start_timeout": 0}, "start_timeout"),
        ({"security": "tls"}, "security must be one of"),
        ({"acls": True}, "give security= too"),
        ({"config": {"super.users": "User:me"}}, "admin_config"),
    ],
)
def test_options_that_are_wrong_or_contradict_each_other_are_refused_before_anything_starts(
    options: dict[str, Any], says: str
) -> None:
    with pytest.raises(ConfigurationError, match=says):
        DevBroker(**options)


def test_a_broker_that_is_not_started_says_so() -> None:
    with pytest.raises(DevBrokerError, match="not started"):
        _ = DevBroker().bootstrap_servers


@pytest.mark.chaos
def test_broker_and_temporary_folder_go_when_the_process_is_killed() -> None:
    program = (
        "import time\nfrom penstock.devbroker import DevBroker\n"
        "broker = DevBroker().start()\nprint(broker.pid, broker.log_path.parent, flush=True)\ntime.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid_text, folder = parent.stdout.readline().split()
        was_there = alive(int(pid_text)) and Path(folder).is_dir()

        parent.send_signal(signal.SIGKILL)

    assert was_there
    assert parent.returncode == -signal.SIGKILL
    wait_until(lambda: not alive(int(pid_text)))
    wait_until(lambda: not Path(folder).exists())
