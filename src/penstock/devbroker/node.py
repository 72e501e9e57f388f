"""A node of an embedded Kafka: a process with its ports and its folder, which stay the same over restarts."""

from __future__ import annotations

import logging
import signal
import socket
from collections.abc import Sequence
from pathlib import Path

from confluent_kafka import KafkaException
from confluent_kafka.admin import ClusterMetadata  # type: ignore[attr-defined] # not in its __all__

from penstock import clients
from penstock.devbroker.settings import HOST, Ports, log_format
from penstock.errors import DevBrokerError
from penstock.supervisor.child import Child

#: Seconds for a node to shut down before it is killed.
STOP_TIMEOUT_S = 15.0

#: Seconds for a running node to answer a request.
_ANSWER_S = 5.0

#: Client settings without log output, for clients whose first requests may be refused.
SILENT = {"logger": logging.getLogger("penstock.devbroker.silent")}
SILENT["logger"].disabled = True


class Node:
    """A broker, and a controller. For one thread at a time.

    Args:
        number: its number, from 1.
        folder: where its files are.
        ports: where it listens.
        java: the program and the options that run Kafka's code.
        has_acls: whether its authorizer logs the permissions that it checks.
    """

    def __init__(self, number: int, folder: Path, ports: Ports, java: Sequence[str], *, has_acls: bool) -> None:
        self.number = number
        self.ports = ports
        self.storage = folder / "kafka"
        self.log_path = folder / "broker.log"
        self.authorizer_log_path = folder / "authorizer.log"
        self.properties_path = folder / "server.properties"
        folder.mkdir(exist_ok=True)
        log_settings = folder / "log4j2.properties"
        log_settings.write_text(log_format(self.authorizer_log_path if has_acls else None), encoding="ascii")
        #: The beginning of all commands that run Kafka's code for this node.
        self.java = [*java[:1], f"-Dlog4j2.configurationFile={log_settings.as_uri()}", *java[1:]]
        self._child: Child | None = None

    @property
    def address(self) -> str:
        """The address for clients."""
        return f"{HOST}:{self.ports.clients}"

    @property
    def inside(self) -> str:
        """The address without permissions and passwords; the clients' address if the broker has no security."""
        return f"{HOST}:{self.ports.inside}"

    @property
    def pid(self) -> int | None:
        """The id of its present or last process."""
        return None if self._child is None else self._child.pid

    @property
    def runs(self) -> bool:
        """Whether its process exists; a frozen one counts."""
        return self._child is not None and self._child.wait(0) is None

    @property
    def can_answer(self) -> bool:
        """Whether its process exists and is not frozen."""
        return self._child is not None and self.runs and not self._child.suspended

    def run(self, remove: Path | None, lock: int) -> None:
        """Start its process; `Child` explains the arguments."""
        self.close()
        command = [*self.java, "kafka.Kafka", str(self.properties_path)]
        with self.log_path.open("ab") as log:
            self._child = Child(command, stdout=log, stderr=log, remove=remove, lock=lock)

    def wait(self, timeout_s: float) -> int | None:
        """Return the exit code of its process, or None if it still runs after that time."""
        return None if self._child is None else self._child.wait(timeout_s)

    def metadata(self, topic: str | None = None) -> ClusterMetadata:
        """Return this broker's metadata of a topic, or of all topics; `KafkaException` if it does not answer."""
        admin = clients.admin(self.inside, SILENT)
        return admin.list_topics(timeout=_ANSWER_S) if topic is None else admin.list_topics(topic, timeout=_ANSWER_S)

    def answers(self, cluster_id: str, brokers: set[int]) -> bool:
        """Return whether this node answers and knows those brokers. Another broker may answer on its port."""
        try:
            socket.create_connection((HOST, self.ports.inside), timeout=1).close()
            metadata = self.metadata()
        except (OSError, KafkaException):
            return False  # the caller asks again and keeps the deadline
        found: str | None = metadata.cluster_id
        return found == cluster_id and brokers <= set(metadata.brokers)

    def end(self) -> None:
        """Ask the process to shut down; `kill` waits for that."""
        if self._child is not None:
            for number in (signal.SIGTERM, signal.SIGCONT):  # a frozen process would not receive the first
                self._child.signal(number)

    def kill(self, after_s: float = 0.0) -> None:
        """Wait until the process has ended; kill it after `after_s` seconds."""
        if self._child is not None and self._child.wait(after_s) is None:
            self._child.signal(signal.SIGKILL)
            if self._child.wait(STOP_TIMEOUT_S) is None:
                raise DevBrokerError(f"{self} did not end after SIGKILL; check the machine")

    def freeze(self) -> None:
        """Stop the process and return when all its threads are stopped."""
        if self._child is None or not self._child.suspend():
            why = "has ended, so it cannot be frozen; restart() brings it back"
            raise DevBrokerError(f"{self} {'did not stop; check the machine' if self.runs else why}")

    def thaw(self) -> None:
        """Continue a frozen process."""
        if self._child is not None and not self._child.resume():
            raise DevBrokerError(f"{self} did not continue after SIGCONT; check the machine")

    def close(self) -> None:
        """Kill the process if it runs."""
        if self._child is not None:
            self._child.close()

    def __str__(self) -> str:
        """Name the process in errors."""
        return f"the broker's process {self.pid} (node {self.number})"
