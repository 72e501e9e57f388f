"""The nodes of an embedded Kafka: their folder, their start, and the leaders of partitions."""

from __future__ import annotations

import base64
import fcntl
import logging
import os
import shutil
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, TypeVar

from confluent_kafka import KafkaException
from confluent_kafka.admin import PartitionMetadata  # type: ignore[attr-defined] # not in its __all__

from penstock import clients
from penstock.clients.bounded_calls import ask_again
from penstock.clients.kafka_errors import reason
from penstock.devbroker.java.jars import KAFKA_VERSION, jars_folder, kafka_jars, last_lines
from penstock.devbroker.java.runtime import find_java
from penstock.devbroker.node import SILENT, STOP_TIMEOUT_S, Node
from penstock.devbroker.security import ClientSecurity, Security, check_security, write_private
from penstock.devbroker.settings import OWNED_SETTINGS, choose_ports, properties
from penstock.errors import ConfigurationError, DevBrokerError
from penstock.options import choice, positive_int, reserved, seconds

_log = logging.getLogger(__name__)

_POLL_INTERVAL_S = 0.05
#: Seconds between two log lines about a slow start.
_SLOW_START_S = 20.0
#: Seconds for one request to the transaction coordinator, which is loading.
_ANSWER_S = 10.0

_JVM_OPTIONS = ("-XX:+UseSerialGC", "-XX:-UsePerfData", "-Djava.awt.headless=true")
#: The heap of a single node, and of each node in a cluster.
_HEAP, _SMALL_HEAP = "-Xmx1g", "-Xmx256m"
#: Users may replace these options, as in Kafka's own scripts. The JVM's second compiler is left out. It makes a
#: long-running broker faster, but takes a third of the start, and half a core in the first minutes.
_PERFORMANCE_VARIABLE = "KAFKA_JVM_PERFORMANCE_OPTS"
_PERFORMANCE_OPTIONS = "-XX:TieredStopAtLevel=1"

#: The transactional id that each start initialises once.
_WARM_UP_ID = "penstock-devbroker-warm-up"

T = TypeVar("T")


class Cluster:
    """The nodes, numbered from 1.

    Its arguments are those of `DevBroker`.
    """

    def __init__(
        self,
        *,
        nodes: int = 1,
        port: int | None = None,
        data_dir: Path | None = None,
        config: Mapping[str, str] | None = None,
        start_timeout: float = 300.0,
        security: Security | str | None = None,
        acls: bool = False,
    ) -> None:
        seconds("start_timeout", start_timeout)
        positive_int("nodes", nodes)
        if port is not None and not 1 <= port <= 65_536 - nodes:
            raise ConfigurationError(f"port must be between 1 and {65_536 - nodes}, but is {port!r}")
        reserved(config or {}, OWNED_SETTINGS, "the embedded broker")
        self._kind = None if security is None else choice("security", security, Security)
        check_security(self._kind, acls=acls)
        self._has_acls = acls
        self._count = nodes
        self._port = port
        self._data_dir = data_dir
        self._config = dict(config or {})
        self._start_timeout_s = start_timeout
        #: The fields below are set from `start` to `stop`. The file is the lock of the folder. Each process guard
        #: inherits it, so it is held until the last guard has ended.
        self._nodes: list[Node] = []
        self._folder = Path()
        self._lock: IO[bytes] | None = None
        self._security: ClientSecurity | None = None

    @property
    def bootstrap_servers(self) -> str:
        """The address for clients, `127.0.0.1:PORT`; several nodes are separated by commas, in order."""
        return ",".join(node.address for node in self._nodes_of(None))

    @property
    def log_path(self) -> Path:
        """The file with the output of the first node."""
        return self._nodes_of(1)[0].log_path

    def leader_of(self, topic: str, partition: int = 0) -> int:
        """Wait until a partition has a leader that runs, and return its node."""

        def leader() -> int | None:
            # A node that was just restarted answers with its last knowledge: all nodes must agree.
            answering = self._answering()
            found = {node.metadata(topic).topics[topic].partitions[partition].leader for node in answering}
            running = {node.number for node in self._nodes if node.runs}
            return found.pop() if len(found) == 1 and found <= running else None

        return self._wait_for(f"which node leads {topic}:{partition}", leader)

    def wait_in_sync(self) -> None:
        """Wait until every partition has a leader and all its replicas are in sync."""

        def are_in_sync() -> bool | None:
            topics = [topic for node in self._answering() for topic in node.metadata().topics.values()]
            return all(_is_in_sync(partition) for topic in topics for partition in topic.partitions.values()) or None

        self._wait_for("that all replicas are in sync", are_in_sync)

    def _answering(self) -> list[Node]:
        """Return the nodes that run and are not frozen; `DevBrokerError` if there are none."""
        if found := [node for node in self._nodes_of(None) if node.can_answer]:
            return found
        raise DevBrokerError("no node of the embedded broker can answer; bring one back by restart() or thaw()")

    def _require_started(self) -> None:
        if not self._nodes:
            raise DevBrokerError("the embedded broker is not started; call start() or use it in a with statement")

    def _nodes_of(self, number: int | None) -> list[Node]:
        """Return the node of that number, or all nodes if it is None."""
        self._require_started()
        if number is None:
            return self._nodes
        if not 1 <= number <= len(self._nodes):
            raise ConfigurationError(f"node must be between 1 and {len(self._nodes)}, but is {number!r}")
        return [self._nodes[number - 1]]

    def _make_nodes(self) -> None:
        """Lock the folder, choose the ports, and write the files that stay the same over restarts."""
        java = find_java()
        jars = kafka_jars(java)
        self._folder = self._make_folder()
        self._lock = _locked(self._folder)
        command = [
            str(java.executable),
            _HEAP if self._count == 1 else _SMALL_HEAP,
            *_JVM_OPTIONS,
            *os.environ.get(_PERFORMANCE_VARIABLE, _PERFORMANCE_OPTIONS).split(),
            "-cp",
            f"{jars}/*",
        ]
        if self._kind is not None:
            self._security = ClientSecurity(self._kind, self._folder / "certificates")
        ports = choose_ports(self._port, self._count, secured=self._security is not None)
        for number, own in ports.items():
            folder = self._folder if len(ports) == 1 else self._folder / f"node-{number}"
            node = Node(number, folder, own, command, has_acls=self._has_acls)
            self._nodes.append(node)
            settings = self._security.broker_settings(acls=self._has_acls) if self._security is not None else {}
            protocol = "PLAINTEXT" if self._kind is None else self._kind.name
            text = properties(number, ports, node.storage, protocol, {**settings, **self._config})
            write_private(node.properties_path, text.encode("ascii"))

    def _make_folder(self) -> Path:
        if self._data_dir is None:
            return Path(tempfile.mkdtemp(prefix="penstock-broker-"))
        folder = Path(self._data_dir).absolute()
        if "," in str(folder):
            raise ConfigurationError(f"data_dir must not contain a comma (Kafka's separator), but is {folder}")
        if self._count > 1:
            folder /= f"brokers-{self._count}-controllers-0"  # the name from the time of separate controllers
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DevBrokerError(
                f"the data folder {folder} cannot be made: {error.strerror}; choose another data_dir"
            ) from error
        return folder

    def _run(self, nodes: Sequence[Node]) -> None:
        """Format the folder if it is new, start the nodes and return when each answers."""
        started_at = logged_at = time.monotonic()
        deadline = started_at + self._start_timeout_s
        cluster_id = self._format()
        for node in nodes:
            assert self._lock is not None  # noqa: S101 - it was taken with the folder
            node.run(self._folder if self._data_dir is None else None, self._lock.fileno())
        numbers = {node.number for node in nodes}
        for node in nodes:
            while not node.answers(cluster_id, numbers):
                for started in nodes:
                    code = started.wait(_POLL_INTERVAL_S if started is node else 0)
                    if code is not None:
                        raise _failed(started, f"it ended with code {code}")
                now = time.monotonic()
                if now > deadline:
                    raise _failed(node, "it did not answer in time")
                if now >= logged_at + _SLOW_START_S:
                    logged_at = now
                    text = "the embedded Kafka is still starting after %.0f s, of %.0f at most; its log: %s"
                    _log.warning(text, now - started_at, self._start_timeout_s, node.log_path)
        if len(nodes) == len(self._nodes):
            self._load_transactions(deadline)

    def _load_transactions(self, deadline: float) -> None:
        """Wait until the transaction coordinator has loaded. Otherwise the first producers get warnings and delays."""
        settings: dict[str, Any] = {"transactional.id": _WARM_UP_ID, **SILENT}
        producer = clients.producer(",".join(node.inside for node in self._answering()), settings)
        while True:
            try:
                producer.init_transactions(_ANSWER_S)
            except KafkaException as error:
                if not error.args[0].retriable() or time.monotonic() > deadline:
                    raise _failed(
                        self._nodes[0], f"its transaction coordinator did not load: {reason(error)}"
                    ) from error
            else:
                return

    def _format(self) -> str:
        """Return the cluster's id. New folders are formatted with a new id first; its file is written last."""
        cluster_file = self._folder / "cluster-id"
        if cluster_file.is_file():
            return cluster_file.read_text().strip()
        cluster_id, node = _random_id(), self._nodes[0]
        command = [*node.java, "kafka.tools.StorageTool", "format", "--cluster-id", cluster_id]
        command += ["--config", str(node.properties_path), "--ignore-formatted"]
        try:
            with node.log_path.open("ab") as log:
                subprocess.run(  # noqa: S603 - the Java that was found
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    check=True,
                    timeout=self._start_timeout_s,
                )
        except subprocess.TimeoutExpired as error:
            raise _failed(node, "its folder was not formatted in time") from error
        except subprocess.CalledProcessError as error:
            raise _failed(node, f"its folder could not be formatted (code {error.returncode})") from error
        for other in self._nodes[1:]:  # formatted folders differ in two lines, so copies need no further Java
            shutil.copytree(node.storage, other.storage, dirs_exist_ok=True)
            meta = other.storage / "meta.properties"
            lines = [line for line in meta.read_text().splitlines() if not line.startswith(("node.id", "directory.id"))]
            meta.write_text("\n".join([*lines, f"node.id={other.number}", f"directory.id={_random_id()}", ""]))
        cluster_file.write_text(cluster_id)
        return cluster_id

    def _end(self, nodes: Sequence[Node]) -> None:
        """Shut the processes down, all at once, and kill those that take too long."""
        for node in nodes:
            node.end()
        for node in nodes:
            node.kill(after_s=STOP_TIMEOUT_S)

    def _close(self) -> None:
        """Kill the remaining processes, unlock the folder, and remove it if it is temporary."""
        for node in self._nodes:
            node.close()
        self._nodes = []
        self._security = None
        if self._lock is not None:
            self._lock.close()
            self._lock = None
            if self._data_dir is None:
                shutil.rmtree(self._folder, ignore_errors=True)

    def _wait_for(self, what: str, ask: Callable[[], T | None]) -> T:
        """Ask until the answer is not None, within the time of a start, and return it. Failed requests are repeated."""
        try:
            found = ask_again(
                ask,
                self._start_timeout_s,
                _POLL_INTERVAL_S,
                until=lambda answer: answer is not None,
                passes=lambda error: isinstance(error, (KafkaException, LookupError)),
            )
            why = "the brokers did not agree, or named a leader that is down"
        except (KafkaException, LookupError) as error:
            found, why = None, str(error)
        if found is None:
            logs = ", ".join(f"{node.number}: {node.log_path}" for node in self._nodes)
            within = f"within {self._start_timeout_s:g} s"
            raise DevBrokerError(f"the embedded broker did not say {within} {what}: {why}; read its logs ({logs})")
        return found


def _is_in_sync(partition: PartitionMetadata) -> bool:
    return partition.leader >= 0 and set(partition.isrs) == set(partition.replicas)


def _failed(node: Node, what: str) -> DevBrokerError:
    return DevBrokerError(
        f"the embedded Kafka {KAFKA_VERSION} at {node.address} did not start: {what}. "
        f"Correct what its last lines name; if that is a class or a jar, remove {jars_folder()}, which is then fetched "
        f"again:\n{last_lines(node.log_path)}"
    )


def _random_id() -> str:
    """Return an id in Kafka's form. It must not begin with a dash, which would look like an option."""
    while (text := base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")).startswith("-"):
        pass
    return text


def _locked(folder: Path) -> IO[bytes]:
    """Lock the folder until the file is closed here and in all processes that inherit it."""
    file = (folder / "lock").open("ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise DevBrokerError(
            f"another embedded broker uses the data folder {folder}; stop it or choose another data_dir"
        ) from None
    return file
