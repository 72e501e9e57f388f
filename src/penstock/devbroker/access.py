"""Who is let into an embedded broker, and what each may do there: the part of `DevBroker` that security adds."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from pathlib import Path

from penstock.devbroker.cluster import Cluster
from penstock.devbroker.security.certificates import write_private
from penstock.devbroker.security.protocols import ADMIN, ClientSecurity, Security, User, check_security
from penstock.devbroker.security.rights import AskedRight, asked_rights, bindings
from penstock.errors import DevBrokerError
from penstock.options import choice

#: Seconds within which a new user is let in.
_LOGIN_TIMEOUT_S = 60.0


class AccessControl(ABC):
    """Users and rights of a broker; its arguments are those of `DevBroker`."""

    def __init__(self, security: Security | str | None, *, acls: bool) -> None:
        self._kind = None if security is None else choice("security", security, Security)
        check_security(self._kind, acls=acls)
        self._has_acls = acls
        #: Of the broker that runs; None where it does not, or has none.
        self._security: ClientSecurity | None = None

    @property
    def admin_config(self) -> dict[str, str]:
        """The client settings of the user that may do everything, without the address.

        They are empty where the broker has no security, and contain a password where it has passwords.
        """
        self._running_cluster()
        return {} if self._security is None else self._security.client_settings(ADMIN)

    def settings_file(self) -> Path:
        """Write `admin_config` as lines NAME=VALUE, with the address, to a file of the data folder, and return it.

        Its owner alone can read it.
        """
        path = self._running_cluster().folder / "client.properties"
        settings = {"bootstrap.servers": self._running_cluster().address, **self.admin_config}
        write_private(path, "".join(f"{name}={value}\n" for name, value in settings.items()).encode())
        return path

    def user(self, name: str, password: str | None = None) -> User:
        """Make a user, or give one another password, and return it when it can log in.

        Args:
            name: letters, digits, dots, dashes and underlines.
            password: None makes one, and for a user that is there already keeps what it has.

        Raises:
            ConfigurationError: an argument is out of its range.
            DevBrokerError: the broker has no security, or refused the user.
        """
        cluster, security = self._running_cluster(), self._secured()
        known = security.add(name, password)
        config = security.client_settings(name)
        if security.kind.has_passwords:
            cluster.rights().set_password(name, known)
            cluster.await_login(config, time.monotonic() + _LOGIN_TIMEOUT_S)
        return User(name, config)

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
        self._require_acls()
        self._running_cluster().rights().allow(
            bindings(_name(user), operations, topic, group, transactional_id, cluster=cluster, prefix=prefix)
        )

    def asked(self, user: User | str) -> list[AskedRight]:
        """Return the rights that the broker has looked up for a user since it was first started, each once, in order.

        It is what the user's requests need. What it was asked in order to show only what the user may see, as for a
        list of all topics, is there only where it was allowed. Of several nodes, the first's come first.

        Raises:
            DevBrokerError: the broker was started without `acls=True`.
        """
        self._require_acls()
        logs = [node.authorizer_log_path for node in self._running_cluster().brokers]
        return asked_rights(logs, _name(user))

    @abstractmethod
    def _running_cluster(self) -> Cluster:
        """Return the broker's nodes, or raise `DevBrokerError` that says that it was not started."""

    def _security_in(self, folder: Path) -> ClientSecurity | None:
        if self._kind is None:
            return None
        return ClientSecurity(self._kind, folder / "certificates", acls=self._has_acls)

    def _secured(self) -> ClientSecurity:
        self._running_cluster()
        if self._security is None:
            raise DevBrokerError(
                "the embedded broker has no users: it was started without security; "
                "give DevBroker(security='sasl_ssl') or another kind"
            )
        return self._security

    def _require_acls(self) -> None:
        if not self._has_acls:
            raise DevBrokerError(
                "the embedded broker allows everything to everybody: it was started without acls=True; give that"
            )


def _name(user: User | str) -> str:
    return user.name if isinstance(user, User) else user
