"""Runs RocketMQ's name server and broker as processes, and measures its transactional sends on them.

They listen only on 127.0.0.1, store their data in a temporary folder and end with this process in any case.
"""

from __future__ import annotations

import json
import socket
import subprocess
import tempfile
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from peers.java import JavaPeer

from penstock.supervisor.child import Child

VERSION = "5.5.0"
_HOST = "127.0.0.1"
_SIZE = 128
#: Seconds that a server may take until it listens.
_START_S = 180.0
_PEER = JavaPeer(
    "rocketmq",
    VERSION,
    Path(__file__).parent,
    tuple(("org.apache.rocketmq", f"rocketmq-{part}", VERSION) for part in ("broker", "namesrv", "client", "tools")),
)
#: The modules that its own start scripts open.
_OPENED = tuple(
    f"--add-{what}=java.base/{package}=ALL-UNNAMED"
    for what in ("exports", "opens")
    for package in ("jdk.internal.ref", "sun.nio.ch", "java.nio", "java.lang", "java.util")
)
_NAME_SERVER = "org.apache.rocketmq.namesrv.NamesrvStartup"
_BROKER = "org.apache.rocketmq.broker.BrokerStartup"
#: Other settings are RocketMQ's defaults: one master, which answers a send before it is on disk, as Kafka does.
_BROKER_SETTINGS = """\
brokerClusterName=DefaultCluster
brokerName=bench
brokerId=0
brokerIP1={host}
brokerIP2={host}
bindAddress={host}
listenPort={port}
namesrvAddr={server}
storePathRootDir={folder}/store
storePathCommitLog={folder}/store/commitlog
brokerRole=ASYNC_MASTER
flushDiskType=ASYNC_FLUSH
mappedFileSizeCommitLog=268435456
diskMaxUsedSpaceRatio=95
"""


class RocketMQ:
    """A running RocketMQ."""

    def __init__(self, folder: Path, server: str) -> None:
        self._folder, self._server = folder, server

    def measure(self, threads: int, seconds: float) -> dict[str, float]:
        """Return the rate, and p50 and p99 of the ms from send to visible, with `threads` sending threads.

        Raises:
            subprocess.SubprocessError: the runner failed.
            ValueError: messages did not become visible.
        """
        command = _PEER.command("TransactionRunner", "-Xmx3g", f"-Duser.home={self._folder}", *_OPENED)
        arguments = [self._server, f"bench-{uuid.uuid4().hex[:8]}", str(threads), str(seconds), str(_SIZE)]
        said = subprocess.run(  # noqa: S603 - Java, on files of ours
            [*command, *arguments],
            check=True,
            timeout=120 + 2 * seconds,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        found: dict[str, Any] = json.loads(said.stdout.strip().splitlines()[-1])
        if missing := found.pop("missing"):
            raise ValueError(f"{missing} messages did not become visible")
        return found


@contextmanager
def rocketmq() -> Iterator[RocketMQ]:
    """Run RocketMQ; fetch and compile it first if the cache does not have it.

    Raises:
        DevBrokerError: there is no Java, or the cache cannot be written.
        subprocess.SubprocessError: it could not be fetched, or the runner not compiled.
        TimeoutError: a server did not begin to listen; the message has the last lines of its log.
    """
    with ExitStack() as ending:
        # The servers end before their folder is removed.
        name = tempfile.TemporaryDirectory(prefix="penstock-rocketmq-", ignore_cleanup_errors=True)
        folder = Path(ending.enter_context(name))
        # It looks here for replacements of its services.
        services = folder / "META-INF" / "service"
        services.mkdir(parents=True)
        (services / "org.apache.rocketmq.store.ha.HAService").write_text("NoReplicas\n")
        name_port, port = _free_port(), _free_port()
        server = f"{_HOST}:{name_port}"
        settings = f"listenPort={name_port}\nbindAddress={_HOST}\n"
        ending.callback(_start(_NAME_SERVER, folder, settings, name_port, "-Xmx512m").close)
        settings = _BROKER_SETTINGS.format(host=_HOST, port=port, server=server, folder=folder)
        ending.callback(_start(_BROKER, folder, settings, port, "-Xms1500m", "-Xmx1500m").close)
        yield RocketMQ(folder, server)


def _start(program: str, folder: Path, settings: str, port: int, *heap: str) -> Child:
    """Start a server and wait until it listens."""
    name = program.rpartition(".")[-1]
    settings_file, log = folder / f"{name}.conf", folder / f"{name}.log"
    settings_file.write_text(settings)
    homes = (f"-Drocketmq.home.dir={folder}", f"-Duser.home={folder}")
    command = [*_PEER.command(program, *heap, *homes, *_OPENED, before=folder), "-c", str(settings_file)]
    # If this process is killed, the server's guard removes the rest.
    with log.open("ab") as file:
        child = Child(command, stdout=file, stderr=file, remove=folder if program == _BROKER else None)
    try:
        _await_listening(port, child, log)
    except BaseException:
        child.close()
        raise
    return child


def measure_rocketmq(seconds: float, threads: Sequence[int]) -> dict[int, dict[str, float]]:
    """Run RocketMQ and return the result of `RocketMQ.measure` for each number of threads; raises as both."""
    with rocketmq() as running:
        return {wide: running.measure(wide, seconds) for wide in threads}


def _free_port() -> int:
    """Return a free port whose second predecessor is free, too: a broker listens on both."""
    for _ in range(100):
        with socket.socket() as first, socket.socket() as second:
            first.bind((_HOST, 0))
            port: int = first.getsockname()[1]
            if second.connect_ex((_HOST, port - 2)) != 0:
                return port
    raise TimeoutError("no port is free whose neighbour is free, too")


def _await_listening(port: int, child: Child, log: Path) -> None:
    deadline = time.monotonic() + _START_S
    while time.monotonic() < deadline and child.wait(0.1) is None:
        with socket.socket() as tried:
            if tried.connect_ex((_HOST, port)) == 0:
                return
    lines = log.read_text(errors="replace").splitlines() if log.exists() else []
    raise TimeoutError("a server of RocketMQ did not begin to listen: " + "\n".join(lines[-10:]))
