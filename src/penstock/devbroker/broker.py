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
        nodes: how many brokers there are, each a process, and a controller too: the cluster goes on while more than
            half of them run.
        port: port to listen on; None takes a free one. Further nodes take the ports that follow.
        data_dir: folder that keeps topics between brokers; None takes a temporary one, removed in the end. One for
            another number of nodes is a cluster of its own, in the same folder.
        config: broker settings by Kafka's names, over the defaults.
        start_timeout: seconds within which the starting broker must answer: ten on a machine that has nothing else to
            do, minutes on a busy one. Fetching Kafka is not counted.
        security: how clients connect: `sasl_ssl` (SCRAM-SHA-512 over TLS), `sasl_plaintext` (the same without TLS) or
            `ssl` (clients have certificates, whose common name is the user). None takes plain text without users.
        acls: whether users may do only what they were allowed to.

    Raises:
        ConfigurationError: an option is out of its range, or two contradict each other.
        DevBrokerError: `security` with TLS, and the extra `dev-broker-tls` is not installed.
    """

    @property
    def pid(self) -> int:
        """Process id of the Java process, of several that of the first."""
        pid = self._chosen(1)[0].pid
        if pid is None:
            raise DevBrokerError("the embedded broker has no process; call restart()")
        return pid

    @property
    def running(self) -> bool:
        """Whether the processes of all nodes are there (a frozen one is)."""
        return bool(self._nodes) and all(node.runs for node in self._nodes)

    def start(self) -> Self:
        """Start the broker and return when it answers.

        Raises:
            DevBrokerError: Java or Kafka's jars are not to be had, the port is taken, the data folder is in use, or
                the broker did not answer in time; then the message ends with the last lines of its log.
        """
        if self._nodes:
            raise DevBrokerError(f"the embedded broker runs already, at {self.bootstrap_servers}; stop it first")
        try:
            self._make_nodes()
            self._run(self._nodes)
            self._let_users_in()
        except BaseException:
            self._leave()  # Ctrl-C included: nothing may be left behind by a start that failed
            raise
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
        admins = [clients.admin(node.inside, {}) for node in self._answering()]
        ensure_topics(admins[0], [TopicSpec(name, partitions, dict(config or {}))])
        for admin in admins[1:]:
            await_leaders(admin, [name])

    def stop(self, node: int | None = None) -> None:
        """Stop the broker in order, and kill it when that takes too long. Does nothing when none runs.

        A stopped node comes back by `restart`; where all are stopped, a temporary folder is removed, and `start` makes
        another cluster.
        """
        if node is not None:
            self._end(self._chosen(node))
            return
        try:
            # Several nodes would wait for each other: the last have no quorum to take leave of.
            if len(self._nodes) == 1 or self._data_dir is not None:
                self._end(self._nodes)
        finally:
            self._leave()

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
        nodes = self._chosen(node)
        self._end(nodes)
        self._run(nodes)
        if len(nodes) == len(self._nodes):
            self._let_users_in()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_raised: object) -> None:
        self.stop()
