"""A real single-node Apache Kafka in a child process, for development, demonstrations and tests."""

from __future__ import annotations

import shutil
import signal
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from penstock import clients
from penstock.clients.asking import ask_again
from penstock.clients.requests.topics import TopicSpec, ensure_topics
from penstock.devbroker.access import AccessControl
from penstock.devbroker.java.jars import kafka_jars
from penstock.devbroker.java.runtime import find_java
from penstock.devbroker.node import STOP_TIMEOUT_S, Node
from penstock.devbroker.security.protocols import Security
from penstock.devbroker.settings import OWNED_SETTINGS
from penstock.errors import ConfigurationError, DevBrokerError
from penstock.options import positive, positive_int, reserved

#: Seconds in which the broker answers a question, and between two questions.
_ANSWER_S = 30.0
_LOOK_INTERVAL_S = 0.01


class DevBroker(AccessControl):
    """A Kafka broker on 127.0.0.1 that ends with this process, however this process ends.

    Topics are not created by being asked for: `auto.create.topics.enable` is false. One thread at a time may call
    its methods; which one does not matter, and the broker outlives the thread that started it.

    With `security=`, clients have to prove who they are, as users made with `user`, and with `acls=True` they may do
    only what `allow` gave them. It is there to develop and test against, and guards nothing: the broker talks to
    itself on further ports of 127.0.0.1 that ask for nothing, and signs its certificates itself.

    It is made to start soon. One that is measured for long is faster with both compilers of the JVM: set
    `KAFKA_JVM_PERFORMANCE_OPTS` to "-XX:+TieredCompilation".

    Args:
        port: port to listen on; None takes a free one.
        data_dir: folder that keeps topics between brokers; None takes a temporary one, removed in the end.
        config: broker settings by Kafka's names, over the defaults.
        start_timeout: seconds for which the starting broker may stand still, and seconds of CPU time within which it
            must answer. On a busy machine it is waited for as long as it gets on. Fetching Kafka is not counted.
        progress: whether to show the progress of that; None shows it when standard error is a terminal.
        security: how clients connect: `sasl_ssl` (SCRAM-SHA-256, SCRAM-SHA-512 or PLAIN over TLS), `sasl_plaintext`
            (the same without TLS), `ssl` (clients have certificates, whose common name is the user) or `oauthbearer`
            (tokens without a signature, over TLS). None takes plain text without users.
        acls: whether users may do only what they were allowed to.
        users: passwords of users that are there from the start, by name. Only they can use PLAIN.
        expired_certificate: whether the broker shows a certificate that ended a day ago.

    Raises:
        ConfigurationError: an option is out of its range, or two contradict each other.
        DevBrokerError: `security` with TLS, and the extra `dev-broker-tls` is not installed.
    """

    def __init__(
        self,
        *,
        port: int | None = None,
        data_dir: Path | None = None,
        config: Mapping[str, str] | None = None,
        start_timeout: float = 60.0,
        progress: bool | None = None,
        security: Security | str | None = None,
        acls: bool = False,
        users: Mapping[str, str] | None = None,
        expired_certificate: bool = False,
    ) -> None:
        positive("start_timeout", start_timeout)
        if port is not None and not 1 <= port <= 65_535:  # noqa: PLR2004 - the range of TCP
            raise ConfigurationError(f"port must be between 1 and 65535, but is {port!r}")
        reserved(config or {}, OWNED_SETTINGS, "the embedded broker")
        super().__init__(security, acls=acls, users=users, expired_certificate=expired_certificate)
        self._wanted_port = port
        self._data_dir = data_dir
        self._config = dict(config or {})
        self._start_timeout_s = start_timeout
        self._progress = progress
        self._node: Node | None = None

    @property
    def bootstrap_servers(self) -> str:
        """The address for clients, `127.0.0.1:PORT`."""
        return self._running_node().address

    @property
    def pid(self) -> int:
        """Process id of the Java process."""
        pid = self._running_node().child.pid
        if pid is None:
            raise DevBrokerError("the embedded broker has no process; call start() first")
        return pid

    @property
    def log_path(self) -> Path:
        """File with what the broker prints."""
        return self._running_node().log_path

    @property
    def running(self) -> bool:
        """Whether the broker's process is there (a suspended one is)."""
        return self._node is not None and self._node.child.wait(0) is None

    def start(self) -> Self:
        """Start the broker and return when it answers.

        Raises:
            DevBrokerError: Java or Kafka's jars are not to be had, the port is taken, the data folder is in use, or
                the broker did not answer in time; then the message ends with the last lines of its log.
        """
        if self._node is not None:
            raise DevBrokerError(f"the embedded broker runs already, at {self.bootstrap_servers}; stop it first")
        java = find_java()
        jars = kafka_jars(java, progress=self._progress)
        folder, temporary = self._folder()
        node: Node | None = None
        try:
            security = self._security_in(folder)
            node = Node(
                java, jars, folder, temporary=temporary, port=self._wanted_port, config=self._config, security=security
            )
            node.start(self._start_timeout_s)
        except BaseException:
            # Ctrl-C included: nothing may be left behind by a start that failed.
            if node is not None:
                node.close()
            if temporary:
                shutil.rmtree(folder, ignore_errors=True)
            raise
        self._node, self._security = node, security
        return self

    def create_topic(self, name: str, partitions: int = 1, config: Mapping[str, str] | None = None) -> None:
        """Create a topic, unless it exists, and return when its partitions have leaders.

        Args:
            name: name of the topic.
            partitions: number of partitions.
            config: topic settings by Kafka's names.

        Raises:
            PenstockError: the broker refused to create it; the message says why.
        """
        positive_int("partitions", partitions)
        inside = self._running_node().inside
        admin = clients.admin(inside, {})
        ensure_topics(admin, inside, [TopicSpec(name, partitions, dict(config or {}))])
        # Whoever asks for the ends of a partition before it has a leader is refused.

        def has_leaders() -> bool:
            found = admin.list_topics(name, timeout=_ANSWER_S).topics[name]
            return all(one.leader >= 0 for one in found.partitions.values())

        if not ask_again(has_leaders, self._start_timeout_s, _LOOK_INTERVAL_S):
            raise DevBrokerError(f"topic {name} of the embedded broker has no leader; read {self.log_path}")

    def stop(self) -> None:
        """Stop the broker in order, and kill it when that takes too long. Does nothing when none runs."""
        if self._node is not None:
            node, self._node = self._node, None
            try:
                node.stop()
            finally:
                node.close()

    def kill(self) -> None:
        """Kill the broker with SIGKILL and return when it is gone; `restart` brings it back."""
        node = self._running_node()
        node.child.signal(signal.SIGKILL)
        if node.child.wait(STOP_TIMEOUT_S) is None:
            raise DevBrokerError(f"the broker's process {node.child.pid} did not end when killed; look at the machine")

    def suspend(self) -> None:
        """Freeze the broker with SIGSTOP: connections stay open and nothing answers. `resume` ends it.

        It returns when the last of the broker's threads stands still: no request is answered after that.

        Raises:
            DevBrokerError: the broker's process has ended, or does not stop.
        """
        child = self._running_node().child
        if not child.suspend():
            why = "did not stop when told to; look at the machine"
            if child.wait(0) is not None:
                why = "has ended, so it cannot be suspended; restart() brings it back"
            raise DevBrokerError(f"the broker's process {child.pid} {why}")

    def resume(self) -> None:
        """Let a suspended broker go on, if it is suspended; `DevBrokerError` where it does not go on."""
        child = self._running_node().child
        if not child.resume():
            raise DevBrokerError(f"the broker's process {child.pid} did not go on when told to; look at the machine")

    def restart(self) -> None:
        """Start the broker anew on the same port and data, stopping it first if it still runs; errors as `start`."""
        node = self._running_node()
        node.stop()
        node.start(self._start_timeout_s)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_raised: object) -> None:
        self.stop()

    def _running_node(self) -> Node:
        if self._node is None:
            raise DevBrokerError("the embedded broker is not started; call start() or use it in a with statement")
        return self._node

    def _folder(self) -> tuple[Path, bool]:
        if self._data_dir is None:
            return Path(tempfile.mkdtemp(prefix="penstock-broker-")), True
        folder = Path(self._data_dir).absolute()
        if "," in str(folder):
            raise ConfigurationError(f"data_dir must not contain a comma (Kafka's separator), but is {folder}")
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DevBrokerError(
                f"the data folder {folder} cannot be made: {error.strerror}; choose another data_dir"
            ) from error
        return folder, False
