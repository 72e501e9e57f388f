from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from penstock.devbroker.java.jars import cached
from penstock.errors import DevBrokerError
from waiting import wait_until

#: Fills the cache named by its first argument, leaves a trace in the second, and waits for the file in the third.
PROGRAM = """
import sys, time
from pathlib import Path
from penstock.devbroker.java.jars import cached

folder, traces, go = map(Path, sys.argv[1:4])

def resolver(jars, work):
    (jars / "half.jar").write_bytes(b"1")
    (traces / str(time.monotonic_ns())).touch()
    while not go.exists():  # the test says when
        time.sleep(0.01)
    (jars / "other.jar").write_bytes(b"22")

cached(folder, resolver)
"""


def fill(jars: Path, _work: Path) -> None:
    (jars / "one.jar").write_bytes(b"1")
    (jars / "two.jar").write_bytes(b"22")


def refuse(_jars: Path, _work: Path) -> None:
    raise AssertionError("a cache that is there must not be resolved again")


@pytest.fixture
def traces(tmp_path: Path) -> Path:
    (tmp_path / "traces").mkdir()
    return tmp_path / "traces"


def start(folder: Path, traces: Path, go: Path) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", PROGRAM, str(folder), str(traces), str(go)])


def test_a_cache_is_used_as_it_is(tmp_path: Path) -> None:
    folder = tmp_path / "cache" / "kafka"
    cached(folder, fill)

    cached(folder, refuse)

    assert {jar.name for jar in folder.glob("*.jar")} == {"one.jar", "two.jar"}


def test_two_processes_with_a_cold_cache_resolve_once(tmp_path: Path, traces: Path) -> None:
    folder, go = tmp_path / "kafka", tmp_path / "go"
    both = [start(folder, traces, go) for _ in range(2)]
    wait_until(lambda: list(traces.iterdir()))

    go.touch()
    codes = [process.wait(60) for process in both]

    assert codes == [0, 0]
    assert len(list(traces.iterdir())) == 1
    assert {jar.name for jar in folder.glob("*.jar")} == {"half.jar", "other.jar"}


def test_what_a_killed_resolver_left_is_not_trusted(tmp_path: Path, traces: Path) -> None:
    folder = tmp_path / "kafka"
    killed = start(folder, traces, tmp_path / "never")
    wait_until(lambda: list(traces.iterdir()))
    killed.kill()
    killed.wait(30)
    leftovers = list(tmp_path.glob("kafka.partial-*"))

    cached(folder, fill)

    assert leftovers
    assert not list(tmp_path.glob("kafka.partial-*"))
    assert {jar.name for jar in folder.glob("*.jar")} == {"one.jar", "two.jar"}


def test_a_resolver_that_fails_leaves_no_cache(tmp_path: Path) -> None:
    def fail(jars: Path, _work: Path) -> None:
        (jars / "one.jar").write_bytes(b"1")
        raise DevBrokerError("Ivy ended with code 1")

    with pytest.raises(DevBrokerError, match="Ivy"):
        cached(tmp_path / "kafka", fail)

    assert [path.name for path in tmp_path.iterdir()] == ["kafka.lock"]


def test_a_cache_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()

    with pytest.raises(DevBrokerError, match="XDG_CACHE_HOME"):
        cached(tmp_path / "file" / "kafka", fill)
