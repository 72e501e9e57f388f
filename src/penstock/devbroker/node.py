"""One process of an embedded Kafka with its ports and its folder: what stays the same over restarts."""

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

#: Seconds a node may take to end in order before it is killed.
STOP_TIMEOUT_S = 15.0

#: Seconds within which a node that runs answers one question.
_ANSWER_S = 5.0

#: For clients that are expected to be refused at first.
SILENT = {"logger": logging.getLogger("penstock.devbroker.silent")}
SILENT["logger"].disabled = True


class Node:
    """A broker, and a controller. For one thread at a time.

    Args:
        number: its number, from 1.
        folder: where its files are.
        ports: where it listens.
        java: the program and the options that run Kafka's code.
        has_acls: whether what its authorizer was asked is logged.
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
        #: The beginning of each command that runs Kafka's code for this node.
        self.java = [*java[:1], f"-Dlog4j2.configurationFile={log_settings.as_uri()}", *java[1:]]
        self._child: Child | None = None

    @property
    def address(self) -> str:
        """The address for clients."""
        return f"{HOST}:{self.ports.clients}"

    @property
    def inside(self) -> str:
        """The address at which this process needs no right and no password; where there are none, that of clients."""
        return f"{HOST}:{self.ports.inside}"

    @property
    def pid(self) -> int | None:
        """The id of its process, or of the last that it had."""
        return None if self._child is None else self._child.pid

    @property
    def runs(self) -> bool:
        """Whether its process is there (a frozen one is)."""
        return self._child is not None and self._child.wait(0) is None

    @property
    def can_answer(self) -> bool:
        """Whether its process is there and not frozen."""
        return self._child is not None and self.runs and not self._child.suspended

    def run(self, remove: Path | None, lock: int) -> None:
        """Start its process; `Child` has what the arguments are."""
        self.close()
        command = [*self.java, "kafka.Kafka", str(self.properties_path)]
        with self.log_path.open("ab") as log:
            self._child = Child(command, stdout=log, stderr=log, remove=remove, lock=lock)

    def wait(self, timeout_s: float) -> int | None:
        """Return the exit code of its process, or None where it still runs after that time."""
        return None if self._child is None else self._child.wait(timeout_s)

    def metadata(self, topic: str | None = None) -> ClusterMetadata:
        """Return what this broker knows of the topic, or of all; `KafkaException` where it does not answer."""
        admin = clients.admin(self.inside, SILENT)
        return admin.list_topics(timeout=_ANSWER_S) if topic is None else admin.list_topics(topic, timeout=_ANSWER_S)

    def answers(self, cluster_id: str, brokers: set[int]) -> bool:
        """Tell whether this very node answers and knows those brokers: on its port another one might."""
        try:
            socket.create_connection((HOST, self.ports.inside), timeout=1).close()
            metadata = self.metadata()
        except (OSError, KafkaException):
            return False  # the caller asks again and keeps the deadline
        found: str | None = metadata.cluster_id
        return found == cluster_id and brokers <= set(metadata.brokers)

    def end(self) -> None:
        """Tell the process to end in order; `kill` waits for that."""
        if self._child is not None:
            for number in (signal.SIGTERM, signal.SIGCONT):  # a frozen process could not hear the first
                self._child.signal(number)

    def kill(self, after_s: float = 0.0) -> None:
        """Return when the process is gone, killed if it is there after that time."""
        if self._child is not None and self._child.wait(after_s) is None:
            self._child.signal(signal.SIGKILL)
            if self._child.wait(STOP_TIMEOUT_S) is None:
                raise DevBrokerError(f"{self} did not end when it was killed; look at the machine")

    def freeze(self) -> None:
        """Stop the process and return when the last of its threads stands still."""
        if self._child is None or not self._child.suspend():
            why = "has ended, so it cannot be frozen; restart() brings it back"
            raise DevBrokerError(f"{self} {'did not stop; look at the machine' if self.runs else why}")

    def thaw(self) -> None:
        """Let a frozen process go on."""
        if self._child is not None and not self._child.resume():
            raise DevBrokerError(f"{self} did not go on after SIGCONT; look at the machine")

    def close(self) -> None:
        """Kill the process if it runs."""
        if self._child is not None:
            self._child.close()

    def __str__(self) -> str:
        """Name the process in errors."""
        return f"the broker's process {self.pid} (node {self.number})"
