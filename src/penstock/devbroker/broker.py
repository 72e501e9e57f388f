"""A real single-node Apache Kafka in a child process, for development, demonstrations and tests."""

from __future__ import annotations

import shutil
import signal
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

from penstock.config import choice, positive, positive_int
from penstock.devbroker.certificates import Certificate, Certificates
from penstock.devbroker.jars import kafka_jars
from penstock.devbroker.java import find_java
from penstock.devbroker.node import HOST, STOP_TIMEOUT_S, Node
from penstock.devbroker.rights import AskedRight, Rights, asked_rights, bindings
from penstock.devbroker.security import (
    ADMIN,
    ClientSecurity,
    Security,
    User,
    check_security,
    check_user,
)
from penstock.devbroker.settings import check_config
from penstock.errors import ConfigurationError, DevBrokerError
from penstock.kafka import TopicSpec, admin_client, ensure_topics


class DevBroker:
    """A Kafka broker on 127.0.0.1 that ends with this process, however this process ends.

    Topics are not created by being asked for: `auto.create.topics.enable` is false. One thread at a time may call
    its methods; which one does not matter, and the broker outlives the thread that started it.

    With `security=`, clients have to prove who they are, as users made with `user`, and with `acls=True` they may do
    only what `allow` gave them. It is there to develop and test against, and guards nothing: the broker talks to
    itself on further ports of 127.0.0.1 that ask for nothing, and signs its certificates itself.

    Args:
        port: port to listen on; None takes a free one.
        data_dir: folder that keeps topics between brokers; None takes a temporary one, removed in the end.
        config: broker settings by Kafka's names, over the defaults.
        start_timeout: seconds within which the broker must answer. Fetching Kafka the first time is not counted.
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
        check_config(config or {})
        self._kind = None if security is None else choice("security", security, Security)
        check_security(self._kind, users or {}, acls=acls, expired_certificate=expired_certificate)
        self._has_acls = acls
        self._users = dict(users or {})
        self._expired_certificate = expired_certificate
        self._wanted_port = port
        self._data_dir = data_dir
        self._config = dict(config or {})
        self._start_timeout_s = start_timeout
        self._progress = progress
        self._node: Node | None = None
        self._security: ClientSecurity | None = None

    @property
    def bootstrap_servers(self) -> str:
        """The address for clients, `127.0.0.1:PORT`."""
        return f"{HOST}:{self._running_node().port}"

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
                java,
                jars,
                folder,
                temporary=temporary,
                port=self._wanted_port,
                config=self._config,
                security=security,
            )
            node.start(time.monotonic() + self._start_timeout_s)
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
        """Create a topic, unless it exists.

        Args:
            name: name of the topic.
            partitions: number of partitions.
            config: topic settings by Kafka's names.

        Raises:
            PenstockError: the broker refused to create it; the message says why.
        """
        positive_int("partitions", partitions)
        inside = self._running_node().inside
        ensure_topics(admin_client(inside, {}), inside, [TopicSpec(name, partitions, dict(config or {}))])

    @property
    def admin_config(self) -> dict[str, str]:
        """The client settings of the user that may do everything, without the address.

        They are empty where the broker has no security, and contain a password where it has passwords.
        """
        self._running_node()
        return {} if self._security is None else self._security.client_settings(ADMIN, "SCRAM-SHA-512")

    @property
    def certificates(self) -> Certificates:
        """The authority that signed the broker's certificate, `ca_path`, and one that did not, `foreign_ca_path`."""
        return self._secured().certificates

    def user(self, name: str, password: str | None = None, *, mechanism: str = "SCRAM-SHA-512") -> User:
        """Make a user, or give one another password, and return it when it can log in.

        Args:
            name: letters, digits, dots, dashes and underlines.
            password: None makes one, and for a user that is there already keeps what it has.
            mechanism: what `User.config` uses where there are passwords: `SCRAM-SHA-256`, `SCRAM-SHA-512`, or `PLAIN`
                for users given to the constructor.

        Raises:
            ConfigurationError: an argument is out of its range.
            DevBrokerError: the broker has no security, or refused the user.
        """
        node, security = self._running_node(), self._secured()
        known = security.add(name, password)
        config = security.client_settings(name, mechanism)
        if security.kind.has_passwords:
            Rights(admin_client(node.inside, {})).set_password(name, known)
            node.await_login(config, time.monotonic() + self._start_timeout_s)
        return User(name, config)

    def certificate(self, name: str, *, expired: bool = False, foreign: bool = False) -> Certificate:
        """Make a certificate with which a client connects as that user, where `security` is `ssl`.

        Args:
            name: its common name, the user.
            expired: whether it ended a day ago; the broker refuses it.
            foreign: whether an authority signs it that the broker does not know; the broker refuses it.

        Raises:
            ConfigurationError: no user can have that name.
            DevBrokerError: the broker has no TLS.
        """
        check_user(name)
        return self._secured().certificates.issue(name, expired=expired, foreign=foreign)

    def allow(
        self,
        user: User | str,
        *operations: str,
        topic: str | None = None,
        group: str | None = None,
        transactional_id: str | None = None,
        cluster: bool = False,
        prefix: bool = False,
    ) -> None:
        """Give a user rights and return when they hold.

        As on every Kafka, READ, WRITE, DELETE and ALTER contain DESCRIBE, and ALTER_CONFIGS contains DESCRIBE_CONFIGS.

        Args:
            user: the user or its name; it need not exist yet.
            operations: Kafka's names of operations, as `read` or `DESCRIBE_CONFIGS`. Each is allowed on all that the
                further arguments name.
            topic: a topic.
            group: a consumer group.
            transactional_id: a transactional id.
            cluster: whether they are meant for the cluster.
            prefix: whether those names are beginnings of names.

        Raises:
            ConfigurationError: no operation or nothing to operate on is named, or there is no such operation.
            DevBrokerError: the broker was started without `acls=True`, or refused.
        """
        self._rights().allow(
            bindings(
                _name(user),
                operations,
                topic=topic,
                group=group,
                transactional_id=transactional_id,
                cluster=cluster,
                prefix=prefix,
            )
        )

    def disallow(
        self,
        user: User | str,
        *operations: str,
        topic: str | None = None,
        group: str | None = None,
        transactional_id: str | None = None,
        cluster: bool = False,
        prefix: bool = False,
    ) -> None:
        """Take rights again that `allow` gave with the same arguments, and return when they no longer hold.

        What was not given is not there to be taken: a name that falls under a prefix keeps the right of the prefix.

        Raises:
            ConfigurationError: as for `allow`.
            DevBrokerError: as for `allow`.
        """
        self._rights().disallow(
            bindings(
                _name(user),
                operations,
                topic=topic,
                group=group,
                transactional_id=transactional_id,
                cluster=cluster,
                prefix=prefix,
            )
        )

    def asked(self, user: User | str) -> list[AskedRight]:
        """Return the rights that the broker has looked up for a user since it was first started, each once, in order.

        It is what the user's requests need. What it was asked in order to show only what the user may see, as for a
        list of all topics, is there only where it was allowed.

        Raises:
            DevBrokerError: the broker was started without `acls=True`.
        """
        self._rights()
        return asked_rights(self._running_node().authorizer_log_path, _name(user))

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
        """Let a suspended broker go on; nothing happens when it was not suspended.

        Raises:
            DevBrokerError: the broker's process does not go on.
        """
        child = self._running_node().child
        if not child.resume():
            raise DevBrokerError(f"the broker's process {child.pid} did not go on when told to; look at the machine")

    def restart(self) -> None:
        """Start the broker anew on the same port and data, stopping it first if it still runs.

        Raises:
            DevBrokerError: as for `start`.
        """
        node = self._running_node()
        node.stop()
        node.start(time.monotonic() + self._start_timeout_s)

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _running_node(self) -> Node:
        if self._node is None:
            raise DevBrokerError("the embedded broker is not started; call start() or use it in a with statement")
        return self._node

    def _security_in(self, folder: Path) -> ClientSecurity | None:
        if self._kind is None:
            return None
        return ClientSecurity(
            self._kind,
            folder / "certificates",
            self._users,
            acls=self._has_acls,
            expired_certificate=self._expired_certificate,
        )

    def _secured(self) -> ClientSecurity:
        self._running_node()
        if self._security is None:
            raise DevBrokerError(
                "the embedded broker has no users: it was started without security; "
                "give DevBroker(security='sasl_ssl') or another kind"
            )
        return self._security

    def _rights(self) -> Rights:
        if not self._has_acls:
            raise DevBrokerError(
                "the embedded broker allows everything to everybody: it was started without acls=True; give that"
            )
        return Rights(admin_client(self._running_node().inside, {}))

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


def _name(user: User | str) -> str:
    return user.name if isinstance(user, User) else user
