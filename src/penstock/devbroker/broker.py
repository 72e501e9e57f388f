"""A real Apache Kafka in child processes, for development, demonstrations and tests."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Self

from penstock import clients
from penstock.clients.bounded_calls import ask_again
from penstock.clients.topics import TopicSpec, ensure_topics
from penstock.devbroker.access import AccessControl
from penstock.devbroker.cluster import Cluster
from penstock.devbroker.java.jars import kafka_jars
from penstock.devbroker.java.runtime import find_java
from penstock.devbroker.node import Node
from penstock.devbroker.replication import Replication
from penstock.devbroker.security.protocols import Security
from penstock.devbroker.settings import OWNED_SETTINGS
from penstock.errors import ConfigurationError, DevBrokerError
from penstock.options import not_negative, positive, positive_int, reserved

#: Seconds in which the broker answers a question, and between two questions.
_ANSWER_S = 30.0
_LOOK_INTERVAL_S = 0.01


class DevBroker(AccessControl, Replication):
    """A Kafka on 127.0.0.1 that ends with this process, however this process ends.

    Topics are not created by being asked for: `auto.create.topics.enable` is false. One thread at a time may call
    its methods; which one does not matter, and the broker outlives the thread that started it.

    With `nodes=3` it is a cluster: each topic has three copies, two of which must be in sync (`min.insync.replicas`),
    Kafka's own included. Nodes have the numbers 1, 2, 3. Where a method takes a node, None means every node.

    With `security=`, clients have to prove who they are, as users made with `user`, and with `acls=True` they may do
    only what `allow` gave them. It is there to develop and test against, and guards nothing: the broker talks to
    itself on further ports of 127.0.0.1 that ask for nothing, and signs its certificates itself.

    It is made to start soon. One that is measured for long is faster with both compilers of the JVM: set
    `KAFKA_JVM_PERFORMANCE_OPTS` to "-XX:+TieredCompilation".

    Args:
        nodes: how many brokers there are, each a process, and a controller too.
        controllers: further processes that are the only controllers; their numbers follow those of the brokers. With
            them, metadata and elections go on however few brokers run.
        port: port to listen on; None takes a free one. Further nodes take the ports that follow.
        data_dir: folder that keeps topics between brokers; None takes a temporary one, removed in the end. One for
            another number of nodes is a cluster of its own, in the same folder.
        config: broker settings by Kafka's names, over the defaults.
        start_timeout: seconds within which the starting broker must answer on a machine that has nothing else to do; on
            a busy one, so many times as there are processes for each CPU. Fetching Kafka is not counted.
        progress: whether to show the progress of that; None shows it when standard error is a terminal.
        security: how clients connect: `sasl_ssl` (SCRAM-SHA-512 over TLS), `sasl_plaintext` (the same without TLS) or
            `ssl` (clients have certificates, whose common name is the user). None takes plain text without users.
        acls: whether users may do only what they were allowed to.

    Raises:
        ConfigurationError: an option is out of its range, or two contradict each other.
        DevBrokerError: `security` with TLS, and the extra `dev-broker-tls` is not installed.
    """

    def __init__(
        self,
        *,
        nodes: int = 1,
        controllers: int = 0,
        port: int | None = None,
        data_dir: Path | None = None,
        config: Mapping[str, str] | None = None,
        start_timeout: float = 60.0,
        progress: bool | None = None,
        security: Security | str | None = None,
        acls: bool = False,
    ) -> None:
        positive("start_timeout", start_timeout)
        positive_int("nodes", nodes)
        not_negative("controllers", controllers)
        if port is not None and not 1 <= port <= 65_536 - nodes:
            raise ConfigurationError(f"port must be between 1 and {65_536 - nodes}, but is {port!r}")
        reserved(config or {}, OWNED_SETTINGS, "the embedded broker")
        AccessControl.__init__(self, security, acls=acls)
        Replication.__init__(self, start_timeout)
        self._brokers, self._controllers = nodes, controllers
        self._wanted_port = port
        self._data_dir = data_dir
        self._config = dict(config or {})
        self._progress = progress
        self._cluster: Cluster | None = None

    @property
    def bootstrap_servers(self) -> str:
        """The address for clients, `127.0.0.1:PORT`; of several nodes, all of them with commas, in order."""
        return self._running_cluster().address

    @property
    def pid(self) -> int:
        """Process id of the Java process, of several that of the first."""
        return self.pid_of(1)

    def pid_of(self, node: int) -> int:
        """Return the process id of a node."""
        pid = self._chosen(node)[0].child.pid
        if pid is None:
            raise DevBrokerError("the embedded broker has no process; call start() first")
        return pid

    @property
    def log_path(self) -> Path:
        """File with what the broker prints, of several nodes the first."""
        return self._running_cluster().nodes[0].log_path

    @property
    def running(self) -> bool:
        """Whether the processes of all nodes are there (a frozen one is)."""
        return self._cluster is not None and all(node.runs for node in self._cluster.nodes)

    def start(self) -> Self:
        """Start the broker and return when it answers.

        Raises:
            DevBrokerError: Java or Kafka's jars are not to be had, the port is taken, the data folder is in use, or
                the broker did not answer in time; then the message ends with the last lines of its log.
        """
        if self._cluster is not None:
            raise DevBrokerError(f"the embedded broker runs already, at {self.bootstrap_servers}; stop it first")
        java = find_java()
        jars = kafka_jars(java, progress=self._progress)
        folder, temporary = self._folder()
        cluster: Cluster | None = None
        try:
            security = self._security_in(folder)
            cluster = Cluster(
                java,
                jars,
                folder,
                brokers=self._brokers,
                controllers=self._controllers,
                temporary=temporary,
                port=self._wanted_port,
                config=self._config,
                security=security,
            )
            cluster.start(cluster.nodes, self._start_timeout_s)
        except BaseException:
            # Ctrl-C included: nothing may be left behind by a start that failed.
            if cluster is not None:
                cluster.close()
            if temporary:
                shutil.rmtree(folder, ignore_errors=True)
            raise
        self._cluster, self._security = cluster, security
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
        brokers = self._running_cluster().answering
        admins = [clients.admin(node.inside, {}) for node in brokers]
        ensure_topics(admins[0], brokers[0].inside, [TopicSpec(name, partitions, dict(config or {}))])
        # Whoever asks for the ends of a partition before it has a leader is refused.

        def has_leaders() -> bool:
            views = [admin.list_topics(name, timeout=_ANSWER_S).topics[name].partitions for admin in admins]
            return all(view and all(found.leader >= 0 for found in view.values()) for view in views)

        if not ask_again(has_leaders, self._start_timeout_s, _LOOK_INTERVAL_S):
            raise DevBrokerError(f"topic {name} of the embedded broker has no leader; read {self.log_path}")

    def stop(self, node: int | None = None) -> None:
        """Stop the broker in order, and kill it when that takes too long. Does nothing when none runs.

        A stopped node comes back by `restart`; where all are stopped, a temporary folder is removed, and `start` makes
        another cluster.
        """
        if node is not None:
            self._running_cluster().stop(self._chosen(node))
        elif self._cluster is not None:
            cluster, self._cluster = self._cluster, None
            cluster.stop_all()

    def kill(self, node: int | None = None) -> None:
        """Kill the broker with SIGKILL and return when it is gone; `restart` brings it back."""
        for server in self._chosen(node):
            server.kill()

    def freeze(self, node: int | None = None) -> None:
        """Freeze the broker with SIGSTOP: connections stay open and nothing answers. `thaw` ends it.

        It returns when the last of the broker's threads stands still: no request is answered after that.

        Raises:
            DevBrokerError: the broker's process has ended, or does not stop.
        """
        for server in self._chosen(node):
            server.freeze()

    def thaw(self, node: int | None = None) -> None:
        """Let a frozen broker go on, if it is frozen; `DevBrokerError` where it does not go on."""
        for server in self._chosen(node):
            server.thaw()

    def restart(self, node: int | None = None) -> None:
        """Start the broker again on the same port and data, stopping it first if it still runs; errors as `start`.

        It returns when the node answers; `wait_in_sync` returns when it has caught up.
        """
        cluster, nodes = self._running_cluster(), self._chosen(node)
        cluster.stop(nodes)
        cluster.start(nodes, self._start_timeout_s)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_raised: object) -> None:
        self.stop()

    def _running_cluster(self) -> Cluster:
        if self._cluster is None:
            raise DevBrokerError("the embedded broker is not started; call start() or use it in a with statement")
        return self._cluster

    def _chosen(self, number: int | None) -> list[Node]:
        """Return the node of that number, or all."""
        nodes = self._running_cluster().nodes
        if number is None:
            return nodes
        if not 1 <= number <= len(nodes):
            raise ConfigurationError(f"node must be between 1 and {len(nodes)}, but is {number!r}")
        return [nodes[number - 1]]

    def _folder(self) -> tuple[Path, bool]:
        if self._data_dir is None:
            return Path(tempfile.mkdtemp(prefix="penstock-broker-")), True
        folder = Path(self._data_dir).absolute()
        if "," in str(folder):
            raise ConfigurationError(f"data_dir must not contain a comma (Kafka's separator), but is {folder}")
        if self._brokers + self._controllers > 1:
            folder /= f"brokers-{self._brokers}-controllers-{self._controllers}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise DevBrokerError(
                f"the data folder {folder} cannot be made: {error.strerror}; choose another data_dir"
            ) from error
        return folder, False
