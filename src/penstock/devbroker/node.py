"""One Kafka process with its port, folder and lock: what stays the same from start to stop, over restarts."""

from __future__ import annotations

import base64
import fcntl
import logging
import os
import secrets
import signal
import socket
import subprocess
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from confluent_kafka import KafkaException

from penstock import clients
from penstock.clients.kafka_errors import reason
from penstock.devbroker.child import SupervisedChild
from penstock.devbroker.java.jars import KAFKA_VERSION, last_lines
from penstock.devbroker.java.runtime import JavaRuntime
from penstock.devbroker.patience import Patience
from penstock.devbroker.security.certificates import write_private
from penstock.devbroker.security.protocols import ADMIN, ClientSecurity
from penstock.devbroker.security.rights import Rights
from penstock.devbroker.settings import SecuredListener, log_format, properties
from penstock.errors import DevBrokerError

HOST = "127.0.0.1"

#: Ports to choose from: below the range from which Linux picks the near ends of connections, so that nobody takes
#: the port while a broker restarts.
_FIRST_PORT, _LAST_PORT = 20_000, 32_000

#: Seconds a broker may take to end in order before it is killed.
STOP_TIMEOUT_S = 15.0

_LOOK_INTERVAL_S = 0.05
#: Seconds for one try to use the transaction coordinator, which is loading.
_ANSWER_S = 10.0

_JVM_OPTIONS = ("-Xmx1g", "-XX:+UseSerialGC", "-XX:-UsePerfData", "-Djava.awt.headless=true")
#: What may be replaced, as Kafka's own scripts let one. The JVM's second compiler is left out: it makes a broker faster
#: that lives for long, and takes a third of a start, and half a core of the minutes that one of development lives.
_PERFORMANCE_VARIABLE = "KAFKA_JVM_PERFORMANCE_OPTS"
_PERFORMANCE_OPTIONS = "-XX:TieredStopAtLevel=1"

#: The transactional id that is initialised once at each start.
_WARM_UP_ID = "penstock-devbroker-warm-up"


class Node:
    """One broker from its first start to its end."""

    def __init__(
        self,
        java: JavaRuntime,
        jars: Path,
        folder: Path,
        *,
        temporary: bool,
        port: int | None,
        config: Mapping[str, str],
        security: ClientSecurity | None,
    ) -> None:
        self.port = _free_port() if port is None else _checked_port(port)
        self.log_path = folder / "broker.log"
        self._folder = folder
        self._config = config
        self._security = security
        self._inside_port = self.port
        self.authorizer_log_path = folder / "authorizer.log"
        self._properties = folder / "server.properties"
        self._cluster_file = folder / "cluster-id"
        self._java_command = [
            str(java.executable),
            *_JVM_OPTIONS,
            *os.environ.get(_PERFORMANCE_VARIABLE, _PERFORMANCE_OPTIONS).split(),
            f"-Dlog4j2.configurationFile={(folder / 'log4j2.properties').as_uri()}",
            "-cp",
            f"{jars}/*",
        ]
        with _lock(folder) as lock:
            authorizer_log = self.authorizer_log_path if security is not None and security.has_acls else None
            (folder / "log4j2.properties").write_text(log_format(authorizer_log), encoding="ascii")
            self.child = SupervisedChild(
                [*self._java_command, "kafka.Kafka", str(self._properties)],
                log_path=self.log_path,
                remove=folder if temporary else None,
                lock=lock.fileno(),
            )

    def start(self, limit_s: float) -> None:
        """Format the folder if it is new, run the broker and return when it answers: see `Patience`."""
        self._write_properties()
        patience = Patience(f"the embedded Kafka at {self.address}", limit_s, self.log_path)
        cluster_id = self._format(patience)
        pid = self.child.run()
        while not self._answers(cluster_id):
            code = self.child.wait(_LOOK_INTERVAL_S)
            if code is not None:
                raise self._failed(f"it ended with code {code}")
            if patience.is_over(pid):
                raise self._failed("it did not answer in time, and does not get on")
        self._load_transactions(patience, pid)
        if self._security is not None:
            self._let_users_in(self._security, time.monotonic() + limit_s)

    @property
    def address(self) -> str:
        """The address for clients."""
        return f"{HOST}:{self.port}"

    @property
    def inside(self) -> str:
        """The address at which this process needs no right and no password; where there are none, that of clients."""
        return f"{HOST}:{self._inside_port}"

    def await_login(self, config: Mapping[str, Any], deadline: float) -> None:
        """Wait until a client with these settings is let in; `DevBrokerError` where it was not in time."""
        # Whether the client would trust the broker is another question: its certificate may be one that expired.
        unchecked = {"enable.ssl.certificate.verification": "false"} if "ssl.ca.location" in config else {}
        client = clients.admin(self.address, {**config, **unchecked, "logger": _silent()})
        try:
            client.list_topics(timeout=max(0.1, deadline - time.monotonic()))
        except KafkaException as error:
            raise DevBrokerError(
                f"the embedded broker at {self.address} does not let a user in: {reason(error)}; "
                f"read its log {self.log_path}"
            ) from error

    def _let_users_in(self, security: ClientSecurity, deadline: float) -> None:
        """Make the users known from the start, and wait until each can log in."""
        names = security.passwords if security.kind.has_passwords else (ADMIN,)
        for name in names:
            if security.kind.has_passwords:
                Rights(clients.admin(self.inside, {})).set_password(name, security.passwords[name])
            self.await_login(security.client_settings(name, "SCRAM-SHA-512"), deadline)

    def _load_transactions(self, patience: Patience, pid: int) -> None:
        """Wait until the transaction coordinator has loaded: the first producers would meet warnings and delays."""
        settings: dict[str, Any] = {"transactional.id": _WARM_UP_ID, "logger": _silent()}
        producer = clients.producer(self.inside, settings)
        while True:
            try:
                producer.init_transactions(_ANSWER_S)
            except KafkaException as error:
                if not error.args[0].retriable() or patience.is_over(pid):
                    raise self._failed(f"its transaction coordinator did not load: {reason(error)}") from error
            else:
                return

    def stop(self) -> None:
        """End the process in order, or kill it."""
        if self.child.wait(0) is not None:
            return
        for number in (signal.SIGCONT, signal.SIGTERM):  # a suspended process could not hear the second
            self.child.signal(number)
        if self.child.wait(STOP_TIMEOUT_S) is None:
            self.child.signal(signal.SIGKILL)
            self.child.wait(STOP_TIMEOUT_S)

    def close(self) -> None:
        """Kill what is left and remove a temporary folder."""
        self.child.close()

    def _write_properties(self) -> None:
        secured = None
        if self._security is not None:
            self._inside_port = _free_port()
            secured = SecuredListener(self._security.kind.protocol, self._inside_port, self._security.broker_settings())
        text = properties(self.port, _free_port(), self._folder / "kafka", self._config, secured)
        write_private(self._properties, text.encode("ascii"))

    def _format(self, patience: Patience) -> str:
        """Return the cluster's id, giving the folder one if it has none: the file is written when that is done."""
        if self._cluster_file.is_file():
            return self._cluster_file.read_text().strip()
        cluster_id = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
        if cluster_id.startswith("-"):  # would read as an option
            return self._format(patience)
        command = [*self._java_command, "kafka.tools.StorageTool", "format", "--cluster-id", cluster_id]
        command += ["--config", str(self._properties), "--ignore-formatted"]
        with self.log_path.open("ab") as log:
            formatting = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT)  # noqa: S603 - the Java that was found
        try:
            while formatting.poll() is None:
                if patience.is_over(formatting.pid):
                    raise self._failed("its folder was not formatted in time")
                time.sleep(_LOOK_INTERVAL_S)
        finally:
            formatting.kill()
            formatting.wait(STOP_TIMEOUT_S)
        if formatting.returncode != 0:
            raise self._failed(f"its folder could not be formatted (code {formatting.returncode})")
        self._cluster_file.write_text(cluster_id)
        return cluster_id

    def _answers(self, cluster_id: str) -> bool:
        """Tell whether this very broker answers: on its port another one might."""
        try:
            socket.create_connection((HOST, self._inside_port), timeout=1).close()
        except OSError:
            return False
        try:
            metadata = clients.admin(self.inside, {}).list_topics(timeout=5)
        except KafkaException:
            return False  # it listens but is not ready: the caller asks again and keeps the deadline
        found: str | None = metadata.cluster_id
        return found == cluster_id and len(metadata.brokers) == 1

    def _failed(self, what: str) -> DevBrokerError:
        return DevBrokerError(
            f"the embedded Kafka {KAFKA_VERSION} at {self.address} did not start: {what}. "
            f"Correct what its last lines name:\n{last_lines(self.log_path)}"
        )


def _silent() -> logging.Logger:
    """Return a logger for clients that are expected to be refused at first."""
    silent = logging.getLogger("penstock.devbroker.silent")
    silent.disabled = True
    return silent


def _lock(folder: Path) -> IO[bytes]:
    """Lock the folder. The supervisor inherits the lock and so holds it until the broker is gone."""
    file = (folder / "lock").open("ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise DevBrokerError(
            f"another embedded broker uses the data folder {folder}; stop it or choose another data_dir"
        ) from None
    return file


def _checked_port(port: int) -> int:
    if not _is_free(port):
        raise DevBrokerError(
            f"port {port} on {HOST} is taken by another program; stop that program or choose another port"
        )
    return port


def _free_port() -> int:
    for _ in range(200):
        port = _FIRST_PORT + secrets.randbelow(_LAST_PORT - _FIRST_PORT)
        if _is_free(port):
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
