"""A real Apache Kafka in child processes, for development, demonstrations and tests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

from penstock import clients
from penstock.clients.topics import TopicSpec, await_leaders, ensure_topics
from penstock.devbroker.access import AccessControl
from penstock.errors import DevBrokerError
from penstock.options import positive_int


class DevBroker(AccessControl):
    """A Kafka on 127.0.0.1 that ends with this process, however this process ends.

    A request does not create a missing topic: `auto.create.topics.enable` is false. Any thread may call the methods,
    one at a time, and the broker outlives the thread that started it.

    With `nodes=3` it is a cluster: each topic, Kafka's internal topics included, has three copies, and two of them must
    be in sync (`min.insync.replicas`). The nodes have the numbers 1, 2, 3. If a method takes a node, None means all.

    With `security=`, clients must log in as users that `user` created. With `acls=True` they have only the permissions
    of `allow`. Both are for development and tests, and guard nothing: the broker talks to itself on other ports of
    127.0.0.1 without any security, and signs its certificates itself.

    It is configured for a quick start. For long measurements, both compilers of the JVM are faster: set
    `KAFKA_JVM_PERFORMANCE_OPTS` to "-XX:+TieredCompilation".

    Args:
        nodes: number of brokers. Each is a process and also a controller. The cluster works while more than half of
            them run.
        port: port to listen on; None chooses a free one. Further nodes take the ports that follow.
        data_dir: folder that keeps topics between brokers; None makes a temporary one, which is removed at the end. In
            one folder, each number of nodes has a cluster of its own.
        config: broker settings by Kafka's names; they override the defaults.
        start_timeout: seconds within which the starting broker must answer: ten on an idle machine, minutes on a busy
            one. Fetching Kafka does not count.
        security: how clients connect: `sasl_ssl` (SCRAM-SHA-512 over TLS), `sasl_plaintext` (the same without TLS) or
            `ssl` (client certificates; their common name is the user). None means plain text without users.
        acls: whether users need permissions, given by `allow`.

    Raises:
        ConfigurationError: an option is out of its range, or two contradict each other.
        DevBrokerError: `security` with TLS, and the extra `dev-broker-tls` is not installed.
    """

    @property
    def pid(self) -> int:
        """Process id of the Java process of the first node."""
        pid = self._nodes_of(1)[0].pid
        if pid is None:
            raise DevBrokerError("the embedded broker has no process; call restart()")
        return pid

    @property
    def running(self) -> bool:
        """Whether the processes of all nodes exist; frozen ones count."""
        return bool(self._nodes) and all(node.runs for node in self._nodes)

    def start(self) -> Self:
        """Start the broker and return when it answers.

        Raises:
            DevBrokerError: there is no Java, Kafka's jars cannot be fetched, the port or the data folder is in use, or
                the broker did not answer in time. In the last case the message ends with the last lines of its log.
        """
        if self._nodes:
            raise DevBrokerError(f"the embedded broker runs already, at {self.bootstrap_servers}; stop it first")
        try:
            self._make_nodes()
            self._run(self._nodes)
            self._register_users()
        except BaseException:
            self._close()  # a failed start leaves nothing behind, also after Ctrl-C
            raise
        return self

    def create_topic(self, name: str, partitions: int = 1, config: Mapping[str, str] | None = None) -> None:
        """Create a topic, unless it exists, and return when its partitions have leaders.

        Args:
            name: name of the topic.
            partitions: number of partitions.
            config: topic settings by Kafka's names.

        Raises:
            PenstockError: the broker refused to create it; the message gives the reason.
        """
        positive_int("partitions", partitions)
        admins = [clients.admin(node.inside, {}) for node in self._answering()]
        ensure_topics(admins[0], [TopicSpec(name, partitions, dict(config or {}))])
        for admin in admins[1:]:
            await_leaders(admin, [name])

    def stop(self, node: int | None = None) -> None:
        """Shut the broker down, and kill it if that takes too long. Does nothing if none runs.

        `restart` starts a stopped node again. If all nodes are stopped, a temporary folder is removed, and `start`
        makes a new cluster.
        """
        if node is not None:
            self._end(self._nodes_of(node))
            return
        try:
            # Several nodes would wait for each other: the last ones have no quorum to sign off from.
            if len(self._nodes) == 1 or self._data_dir is not None:
                self._end(self._nodes)
        finally:
            self._close()

    def kill(self, node: int | None = None) -> None:
        """Kill the broker with SIGKILL and return when it has ended; `restart` starts it again."""
        for server in self._nodes_of(node):
            server.kill()

    def freeze(self, node: int | None = None) -> None:
        """Freeze the broker with SIGSTOP: connections stay open and nothing answers, until `thaw`.

        It returns when all of the broker's threads are stopped. The broker answers no request after that.

        Raises:
            DevBrokerError: the broker's process has ended, or does not stop.
        """
        for server in self._nodes_of(node):
            server.freeze()

    def thaw(self, node: int | None = None) -> None:
        """Continue a frozen broker; `DevBrokerError` if it does not continue."""
        for server in self._nodes_of(node):
            server.thaw()

    def restart(self, node: int | None = None) -> None:
        """Start the broker again with the same port and data. If it still runs, stop it first. Errors as `start`.

        It returns when the node answers. `wait_in_sync` returns when it has caught up.
        """
        nodes = self._nodes_of(node)
        self._end(nodes)
        self._run(nodes)
        if len(nodes) == len(self._nodes):
            self._register_users()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_raised: object) -> None:
        self.stop()
