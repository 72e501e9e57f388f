"""`penstock explain` and `penstock run --http`, asked of apps that run in processes of their own."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest

from commands import Command
from kafka_tools import produce
from penstock.clients.cluster import TOPIC_IDS_S
from penstock.consumer.inspect import explain_server
from penstock.consumer.poll.topics import WATCH_INTERVAL_S
from penstock.devbroker import DevBroker
from stalls import running
from waiting import wait_until

APP = """
import time
from pathlib import Path
from penstock import App

app = App("{name}", bootstrap_servers="{servers}")

@app.handler("{topic}")
def handle(message):
    Path("begun").touch()
    while not Path("go on").exists():  # a slow handler, until the test says so
        time.sleep(0.02)
"""


@pytest.fixture(autouse=True)
def own_runtime_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))


def test_a_process_answers_explain_and_http_and_names_what_holds_a_partition(
    broker: DevBroker, new_topic: Callable[..., str], tmp_path: Path, on_broker: Command
) -> None:
    topic = new_topic(partitions=1)
    produce(broker.bootstrap_servers, topic, [(b"the key", b"x"), (b"another", b"x")])
    (tmp_path / "shop.py").write_text(APP.format(name=topic, servers=broker.bootstrap_servers, topic=topic))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    with running(tmp_path, "shop:app", "--http", address, "--report") as process, pytest.MonkeyPatch.context() as slow:
        slow.setattr(explain_server, "_TIMEOUT_S", 60.0)
        wait_until((tmp_path / "begun").exists, 120)
        wait_until(lambda: status(address, "/readyz") == 200, 120)
        served = [status(address, path) for path in ("/healthz", "/metrics", "/")]
        wait_until(lambda: f"{topic}: 1 member, 1 partition, lag 2" in on_broker("status", topic).out)
        wait_until(lambda: " File " in on_broker("explain", topic).out)
        code, out, _ = on_broker("explain", topic)
        with_keys, as_json = (on_broker("explain", option).out for option in ("--keys", "--json"))
        others_code, _, others = on_broker("explain", "another-group")
        slow.undo()
        os.kill(process.pid, signal.SIGSTOP)
        wait_until(lambda: Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")
        silent_code, _, silent = on_broker("explain")
        os.kill(process.pid, signal.SIGCONT)
    gone_code, _, gone = on_broker("explain")
    after = on_broker("status", topic)

    first, partition, *_, innermost = out.splitlines()
    assert (code, first) == (0, f"{topic}, process {process.pid}: 1 partition")
    assert f"{topic}:0: lag" in partition
    assert "held by offset 0, in handler handle on penstock-worker-" in partition
    assert (f'File "{tmp_path}/shop.py", line ' in innermost, "the key" in out) == (True, False)
    assert ", key the key" in with_keys
    (said,) = json.loads(as_json)["processes"]
    assert (said["process"], said["group"], said["partitions"][0]["blocking_offset"]) == (process.pid, topic, 0)
    assert (others_code, "no app called another-group" in others) == (1, True)
    assert (silent_code, f"process {process.pid} did not answer" in silent) == (1, True)
    assert (process.returncode, served, status(address, "/healthz")) == (0, [200, 200, 200], None)
    assert (gone_code, "no app of this user answers" in gone) == (1, True)
    assert list(explain_server.folder().glob("*.sock")) == []
    # One that was stopped takes its report back.
    assert (after.code, f"no member of {topic} reports to" in after.err) == (1, True)


def status(address: str, path: str) -> int | None:
    """Return the status of an answer; None without an answer."""
    try:
        with urllib.request.urlopen(f"http://{address}{path}", timeout=60) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return None


def test_the_file_of_a_process_that_was_killed_is_removed(tmp_path: Path) -> None:
    code = (
        "from penstock.consumer.inspect.explain_server import explain_server\n"
        "with explain_server(dict): print('up', flush=True); input()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        answered = explain_server.ask_all()
        process.kill()
    left = list(explain_server.folder().iterdir())

    assert answered == [explain_server.Answer(process.pid, {})]
    assert [one.name.partition("-")[0] for one in left] == [str(process.pid)]
    assert explain_server.ask_all() == []
    assert list(explain_server.folder().iterdir()) == []
    assert tmp_path in explain_server.folder().parents


def test_a_folder_that_others_may_write_to_is_not_used(caplog: pytest.LogCaptureFixture) -> None:
    explain_server.folder().mkdir()
    explain_server.folder().chmod(0o777)

    with explain_server.explain_server(dict):
        answers = explain_server.ask_all()

    assert answers == []
    assert "is not a folder of this user's alone" in caplog.text


def test_an_answer_that_cannot_be_said_leaves_the_app_running(caplog: pytest.LogCaptureFixture) -> None:
    with explain_server.explain_server(lambda: {"not JSON": object()}):
        answers = explain_server.ask_all()
        again = explain_server.ask_all()

    assert answers == again == [explain_server.Answer(os.getpid(), None)]
    assert "got no answer from this process" in caplog.text
    assert not [thread for thread in threading.enumerate() if thread.name == "penstock-explain"]


def test_a_broker_that_is_away_is_named_within_10_seconds() -> None:
    """The next question, its answer that does not come, and the start of the command."""
    assert WATCH_INTERVAL_S + TOPIC_IDS_S <= 9
