"""The nodes of an embedded Kafka: their folders, ports and quorum, and starting them until they answer."""

from __future__ import annotations

import base64
import fcntl
import os
import secrets
import shutil
import socket
import subprocess
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from confluent_kafka import KafkaException

from penstock import clients
from penstock.clients.kafka_errors import reason
from penstock.devbroker.java.jars import KAFKA_VERSION, last_lines
from penstock.devbroker.java.runtime import JavaRuntime
from penstock.devbroker.node import SILENT, STOP_TIMEOUT_S, Node
from penstock.devbroker.patience import Patience
from penstock.devbroker.security.certificates import write_private
from penstock.devbroker.security.protocols import ADMIN, ClientSecurity
from penstock.devbroker.security.rights import Rights
from penstock.devbroker.settings import HOST, Ports, SharedSettings, properties
from penstock.errors import DevBrokerError

#: Ports to choose from: below the range from which Linux picks the near ends of connections, so that nobody takes
#: the port while a broker restarts.
_FIRST_PORT, _LAST_PORT = 20_000, 32_000

_LOOK_INTERVAL_S = 0.05
#: Seconds for one try to use the transaction coordinator, which is loading.
_ANSWER_S = 10.0

_JVM_OPTIONS = ("-XX:+UseSerialGC", "-XX:-UsePerfData", "-Djava.awt.headless=true")
#: The heap of a single node, and of each of several.
_HEAP, _SMALL_HEAP = "-Xmx1g", "-Xmx256m"
#: What may be replaced, as in Kafka's own scripts. The JVM's second compiler is left out: it makes a broker faster
#: that lives for long, and takes a third of a start, and half a core of the minutes that one of development lives.
_PERFORMANCE_VARIABLE = "KAFKA_JVM_PERFORMANCE_OPTS"
_PERFORMANCE_OPTIONS = "-XX:TieredStopAtLevel=1"

#: The transactional id that is initialised once at each start.
_WARM_UP_ID = "penstock-devbroker-warm-up"


class Cluster:
    """The nodes, numbered from 1, brokers first; with `controllers`, the brokers are none themselves."""

    def __init__(
        self,
        java: JavaRuntime,
        jars: Path,
        folder: Path,
        *,
        brokers: int,
        controllers: int,
        temporary: bool,
        port: int | None,
        config: Mapping[str, str],
        security: ClientSecurity | None,
    ) -> None:
        self.folder = folder
        self._security = security
        self._temporary = temporary
        self._cluster_file = folder / "cluster-id"
        command = [
            str(java.executable),
            _HEAP if brokers == 1 else _SMALL_HEAP,
            *_JVM_OPTIONS,
            *os.environ.get(_PERFORMANCE_VARIABLE, _PERFORMANCE_OPTIONS).split(),
            "-cp",
            f"{jars}/*",
        ]
        ports = _ports(port, brokers, controllers, secured=security is not None)
        voters = {number: own.controller for number, own in enumerate(ports, 1) if own.controller is not None}
        protocol = "PLAINTEXT" if security is None else security.kind.name
        self._shared = SharedSettings(brokers, voters, config, protocol)
        self.nodes: list[Node] = []
        try:
            with _lock(folder) as lock:
                for number, own in enumerate(ports, 1):
                    node = Node(
                        number,
                        folder if len(ports) == 1 else folder / f"node-{number}",
                        own,
                        command,
                        authorizer_log=security is not None and security.has_acls,
                        remove=folder if temporary else None,
                        lock=lock.fileno(),
                    )
                    self.nodes.append(node)
        except BaseException:
            self.close()
            raise

    @property
    def brokers(self) -> list[Node]:
        """The nodes to which clients connect."""
        return self.nodes[: self._shared.brokers]

    @property
    def address(self) -> str:
        """The addresses for clients."""
        return ",".join(node.address for node in self.brokers)

    @property
    def inside(self) -> str:
        """The addresses of the brokers that can answer, where this process needs no right and no password."""
        return ",".join(node.inside for node in self.answering)

    @property
    def answering(self) -> list[Node]:
        """The brokers whose processes run and are not frozen; `DevBrokerError` where there is none."""
        if found := [node for node in self.brokers if node.can_answer]:
            return found
        raise DevBrokerError("no node of the embedded broker can answer; bring one back by restart() or thaw()")

    def rights(self) -> Rights:
        """Return what gives and takes rights, and makes users."""
        return Rights([clients.admin(node.inside, {}) for node in self.answering])

    def await_login(self, config: Mapping[str, Any], deadline: float) -> None:
        """Wait until every broker that can answer lets a client with these settings in, or raise `DevBrokerError`."""
        for node in self.answering:
            node.await_login(config, deadline)

    def start(self, nodes: Sequence[Node], limit_s: float) -> None:
        """Format the folders if they are new, run the nodes and return when each answers: see `Patience`."""
        for node in nodes:
            settings = self._security.broker_settings() if self._security is not None else {}
            text = properties(node.number, node.ports, node.storage, self._shared, settings)
            write_private(node.properties_path, text.encode("ascii"))
        cluster_id = self._format(_patience(self.nodes[0], limit_s))
        patience = _patience(nodes[0], limit_s)
        for node in nodes:
            node.child.run()
        self._await_answers(nodes, cluster_id, patience)
        if len(nodes) == len(self.nodes):
            self._load_transactions(patience)
            if self._security is not None:
                self._let_users_in(self._security, time.monotonic() + limit_s)

    def stop(self, nodes: Sequence[Node]) -> None:
        """End the processes in order, all at once, and kill what takes too long."""
        running = [node for node in nodes if node.runs]
        for node in running:
            node.end()
        for node in running:
            node.await_end()

    def stop_all(self) -> None:
        """End what runs, in order where anything is kept of it, and remove a temporary folder."""
        try:
            # Several nodes would wait for each other: the last have no quorum to take leave of.
            if len(self.nodes) == 1 or not self._temporary:
                self.stop(self.nodes)
        finally:
            self.close()

    def close(self) -> None:
        """Kill what is left and remove a temporary folder."""
        for node in self.nodes:
            node.child.close()

    def _await_answers(self, nodes: Sequence[Node], cluster_id: str, patience: Patience) -> None:
        """Wait until each of them answers and all its brokers know all of them."""
        numbers = {node.number for node in nodes if node.is_broker}
        for node in nodes:
            while not node.answers(cluster_id, numbers):
                for started in nodes:
                    code = started.child.wait(_LOOK_INTERVAL_S if started is node else 0)
                    if code is not None:
                        raise self._failed(started, f"it ended with code {code}")
                if patience.is_over():
                    raise self._failed(node, "it did not answer in time")

    def _load_transactions(self, patience: Patience) -> None:
        """Wait until the transaction coordinator has loaded: the first producers would meet warnings and delays."""
        settings: dict[str, Any] = {"transactional.id": _WARM_UP_ID, **SILENT}
        producer = clients.producer(self.inside, settings)
        while True:
            try:
                producer.init_transactions(_ANSWER_S)
            except KafkaException as error:
                if not error.args[0].retriable() or patience.is_over():
                    what = f"its transaction coordinator did not load: {reason(error)}"
                    raise self._failed(self.nodes[0], what) from error
            else:
                return

    def _let_users_in(self, security: ClientSecurity, deadline: float) -> None:
        """Make the users known from the start, and wait until each can log in."""
        names = security.passwords if security.kind.has_passwords else (ADMIN,)
        for name in names:
            if security.kind.has_passwords:
                self.rights().set_password(name, security.passwords[name])
            self.await_login(security.client_settings(name), deadline)

    def _format(self, patience: Patience) -> str:
        """Return the cluster's id, giving the folders one if they have none: the file is written when that is done."""
        if self._cluster_file.is_file():
            return self._cluster_file.read_text().strip()
        cluster_id, node = _random_id(), self.nodes[0]
        command = [*node.java, "kafka.tools.StorageTool", "format", "--cluster-id", cluster_id]
        command += ["--config", str(node.properties_path), "--ignore-formatted"]
        with node.log_path.open("ab") as log:
            formatting = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)  # noqa: S603 - the Java that was found
        try:
            while formatting.poll() is None:
                if patience.is_over():
                    raise self._failed(node, "its folder was not formatted in time")
                time.sleep(_LOOK_INTERVAL_S)
        finally:
            formatting.kill()
            formatting.wait(STOP_TIMEOUT_S)
        if formatting.returncode != 0:
            raise self._failed(node, f"its folder could not be formatted (code {formatting.returncode})")
        for other in self.nodes[1:]:  # a formatted folder differs in two lines: no Java is started for those
            shutil.copytree(node.storage, other.storage, dirs_exist_ok=True)
            meta = other.storage / "meta.properties"
            lines = [line for line in meta.read_text().splitlines() if not line.startswith(("node.id", "directory.id"))]
            meta.write_text("\n".join([*lines, f"node.id={other.number}", f"directory.id={_random_id()}", ""]))
        self._cluster_file.write_text(cluster_id)
        return cluster_id

    def _failed(self, node: Node, what: str) -> DevBrokerError:
        return DevBrokerError(
            f"the embedded Kafka {KAFKA_VERSION} at {node.address} did not start: {what}. "
            f"Correct what its last lines name:\n{last_lines(node.log_path)}"
        )


def _patience(node: Node, limit_s: float) -> Patience:
    return Patience(f"the embedded Kafka at {node.address}", limit_s)


def _random_id() -> str:
    """Return an id as Kafka writes them; one that begins with a dash would read as an option."""
    while (text := base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")).startswith("-"):
        pass
    return text


def _lock(folder: Path) -> IO[bytes]:
    """Lock the folder. The supervisors inherit the lock and so hold it until the last node is gone."""
    file = (folder / "lock").open("ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise DevBrokerError(
            f"another embedded broker uses the data folder {folder}; stop it or choose another data_dir"
        ) from None
    return file


def _ports(first: int | None, brokers: int, controllers: int, *, secured: bool) -> list[Ports]:
    """Choose the ports of each node: those for clients follow on `first`, the others are free ones."""
    taken: set[int] = set() if first is None else set(range(first, first + brokers))
    ports: list[Ports] = []
    for index in range(brokers):
        port = _free_port(taken) if first is None else _checked_port(first + index)
        inside = _free_port(taken) if secured else port
        ports.append(Ports(port, inside, None if controllers else _free_port(taken)))
    return ports + [Ports(None, None, _free_port(taken)) for _ in range(controllers)]


def _checked_port(port: int) -> int:
    if not _is_free(port):
        raise DevBrokerError(
            f"port {port} on {HOST} is taken by another program; stop that program or choose another port"
        )
    return port


def _free_port(taken: set[int]) -> int:
    """Return a free port that is not in `taken`, and add it there."""
    for _ in range(200):
        port = _FIRST_PORT + secrets.randbelow(_LAST_PORT - _FIRST_PORT)
        if port not in taken and _is_free(port):
            taken.add(port)
            return port
    raise DevBrokerError(f"no free port found on {HOST} between {_FIRST_PORT} and {_LAST_PORT}; name one with port=")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        # As Java does: connections of an earlier broker that are still timing out do not count.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except OSError:
            return False
        return True
