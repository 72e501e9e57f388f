"""One process of an embedded Kafka with its ports and its folder: what stays the same over restarts."""

from __future__ import annotations

import logging
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from confluent_kafka import KafkaException
from confluent_kafka.admin import ClusterMetadata  # type: ignore[attr-defined] # not in its __all__

from penstock import clients
from penstock.clients.kafka_errors import reason
from penstock.devbroker.child import SupervisedChild
from penstock.devbroker.settings import HOST, Ports, log_format
from penstock.errors import DevBrokerError

#: Seconds a node may take to end in order before it is killed.
STOP_TIMEOUT_S = 15.0

#: Seconds within which a node that runs answers one question.
_ANSWER_S = 5.0

#: For clients that are expected to be refused at first.
SILENT = {"logger": logging.getLogger("penstock.devbroker.silent")}
SILENT["logger"].disabled = True


class Node:
    """A broker, a controller, or both in one. For one thread at a time."""

    def __init__(
        self,
        number: int,
        folder: Path,
        ports: Ports,
        java: Sequence[str],
        *,
        authorizer_log: bool,
        remove: Path | None,
        lock: int,
    ) -> None:
        self.number = number
        self.ports = ports
        self.storage = folder / "kafka"
        self.log_path = folder / "broker.log"
        self.authorizer_log_path = folder / "authorizer.log"
        self.properties_path = folder / "server.properties"
        folder.mkdir(exist_ok=True)
        log_settings = folder / "log4j2.properties"
        log_settings.write_text(log_format(self.authorizer_log_path if authorizer_log else None), encoding="ascii")
        #: The beginning of each command that runs Kafka's code for this node.
        self.java = [*java[:1], f"-Dlog4j2.configurationFile={log_settings.as_uri()}", *java[1:]]
        self.child = SupervisedChild(
            [*self.java, "kafka.Kafka", str(self.properties_path)], log_path=self.log_path, remove=remove, lock=lock
        )

    @property
    def address(self) -> str:
        """The address for clients; of a node that is only a controller, that of the quorum."""
        return f"{HOST}:{self.ports.clients or self.ports.controller}"

    @property
    def inside(self) -> str:
        """The address at which this process needs no right and no password; where there are none, that of clients."""
        return f"{HOST}:{self.ports.inside or self.ports.controller}"

    @property
    def is_broker(self) -> bool:
        """Whether clients connect to it."""
        return self.ports.clients is not None

    @property
    def runs(self) -> bool:
        """Whether its process is there (a frozen one is)."""
        return self.child.wait(0) is None

    @property
    def can_answer(self) -> bool:
        """Whether it is a broker whose process is there and not frozen."""
        return self.is_broker and self.runs and not self.child.suspended

    def metadata(self, topic: str | None = None) -> ClusterMetadata:
        """Return what this broker knows of the topic, or of all; `KafkaException` where it does not answer."""
        admin = clients.admin(self.inside, SILENT)
        return admin.list_topics(timeout=_ANSWER_S) if topic is None else admin.list_topics(topic, timeout=_ANSWER_S)

    def answers(self, cluster_id: str, brokers: set[int]) -> bool:
        """Tell whether this very node answers and, if it is a broker, knows those: on its port another one might."""
        try:
            socket.create_connection((HOST, int(self.inside.rpartition(":")[2])), timeout=1).close()
        except OSError:
            return False
        if not self.is_broker:
            return True
        try:
            metadata = self.metadata()
        except KafkaException:
            return False  # it listens but is not ready: the caller asks again and keeps the deadline
        found: str | None = metadata.cluster_id
        return found == cluster_id and brokers <= set(metadata.brokers)

    def await_login(self, config: Mapping[str, Any], deadline: float) -> None:
        """Wait until a client with these settings is let in; `DevBrokerError` where it was not in time."""
        client = clients.admin(self.address, {**config, **SILENT})
        try:
            client.list_topics(timeout=max(0.1, deadline - time.monotonic()))
        except KafkaException as error:
            raise DevBrokerError(
                f"the embedded broker at {self.address} does not let a user in: {reason(error)}; "
                f"read its log {self.log_path}"
            ) from error

    def end(self) -> None:
        """Tell the process to end in order; `await_end` waits for that."""
        for number in (signal.SIGCONT, signal.SIGTERM):  # a frozen process could not hear the second
            self.child.signal(number)

    def await_end(self) -> None:
        """Return when the process is gone, and kill it if that takes too long."""
        if self.child.wait(STOP_TIMEOUT_S) is None:
            self.kill()

    def kill(self) -> None:
        """Kill the process and return when it is gone."""
        self.child.signal(signal.SIGKILL)
        if self.child.wait(STOP_TIMEOUT_S) is None:
            raise DevBrokerError(f"{self} did not end when it was killed; look at the machine")

    def freeze(self) -> None:
        """Stop the process and return when the last of its threads stands still."""
        if not self.child.suspend():
            why = "has ended, so it cannot be frozen; restart() brings it back"
            raise DevBrokerError(f"{self} {'did not stop; look at the machine' if self.runs else why}")

    def thaw(self) -> None:
        """Let a frozen process go on."""
        if not self.child.resume():
            raise DevBrokerError(f"{self} did not go on after SIGCONT; look at the machine")

    def __str__(self) -> str:
        """Name the process in errors."""
        return f"the broker's process {self.child.pid} (node {self.number})"
