"""Users and permissions of an embedded broker: the security part of `DevBroker`."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from confluent_kafka import KafkaException
from confluent_kafka.admin import (  # type: ignore[attr-defined] # not in its __all__
    AclBinding,
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    ResourcePatternType,
    ResourceType,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialUpsertion,
)

from penstock import clients
from penstock.clients.answers import answered
from penstock.clients.bounded_calls import ask_again
from penstock.clients.kafka_errors import reason
from penstock.devbroker.cluster import Cluster
from penstock.devbroker.node import SILENT
from penstock.devbroker.security import ADMIN, MECHANISM, ClientSecurity, User, write_private
from penstock.errors import ConfigurationError, DevBrokerError

#: Seconds for the first log-in of a new user.
_LOGIN_TIMEOUT_S = 60.0

#: Seconds for a broker to answer an administrator's request, and to apply it.
_ANSWER_TIMEOUT_S = 30.0
_POLL_INTERVAL_S = 0.005

#: The minimum that Kafka accepts: these passwords guard nothing.
_SCRAM_ITERATIONS = 4096

#: Kafka's resource name for the cluster.
_CLUSTER = "kafka-cluster"

_RESOURCES = {"Topic": "topic", "Group": "group", "TransactionalId": "transactional_id", "Cluster": "cluster"}

#: A line of Kafka's `StandardAuthorizerData.buildAuditMessage`.
_AUDIT_LINE = re.compile(
    r"Principal = User:(?P<user>.+?) is (?P<verdict>Allowed|Denied) operation = (?P<operation>\w+) "
    r"from host = \S+ on resource = (?P<resource>\w+):LITERAL:(?P<name>.*?) for request = (?P<request>\w+) "
)


@dataclass(frozen=True, slots=True)
class AskedRight:
    """A permission that the broker checked because a user's request needed it."""

    #: Kafka's name of the operation, such as `READ`.
    operation: str
    #: `topic`, `group`, `transactional_id` or `cluster`.
    resource: str
    #: Name of the resource; `kafka-cluster` for the cluster.
    name: str
    #: Whether the user had it.
    allowed: bool
    #: Kafka's name of the request that needed it, such as `Fetch`.
    request: str


class AccessControl(Cluster):
    """Users and permissions of a broker."""

    @property
    def admin_config(self) -> dict[str, str]:
        """The client settings of the administrator, who has all permissions, without the address.

        They are empty if the broker has no security, and contain a password if it has passwords.
        """
        self._require_started()
        return {} if self._security is None else self._security.client_settings(ADMIN)

    def settings_file(self) -> Path:
        """Write `admin_config` and the address, as lines NAME=VALUE, to a file in the data folder, and return its path.

        Only its owner can read the file.
        """
        settings = {"bootstrap.servers": self.bootstrap_servers, **self.admin_config}
        path = self._folder / "client.properties"
        write_private(path, "".join(f"{name}={value}\n" for name, value in settings.items()).encode())
        return path

    def user(self, name: str, password: str | None = None) -> User:
        """Create a user, or change its password, and return it as soon as it can log in.

        Args:
            name: letters, digits, dots, dashes and underlines.
            password: None generates one, or keeps the password of an existing user.

        Raises:
            ConfigurationError: an argument is out of its range.
            DevBrokerError: the broker has no security, or refused the user.
        """
        self._require_started()
        if self._security is None:
            raise DevBrokerError(
                "the embedded broker has no users: it was started without security; "
                "give DevBroker(security='sasl_ssl') or another kind"
            )
        self._security.add(name, password)
        return User(name, self._register(self._security, name))

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
        """Grant permissions to a user and return as soon as they apply.

        As in every Kafka, READ, WRITE, DELETE and ALTER include DESCRIBE, and ALTER_CONFIGS includes DESCRIBE_CONFIGS.

        Args:
            user: the user or its name; it need not exist yet.
            operations: Kafka's names of operations, such as `read` or `DESCRIBE_CONFIGS`. Each is allowed on all
                resources that the other arguments name.
            topic: a topic.
            group: a consumer group.
            transactional_id: a transactional id.
            cluster: whether the operations are allowed on the cluster.
            prefix: whether the names are prefixes of names.

        Raises:
            ConfigurationError: no operation or no resource is named, or there is no such operation.
            DevBrokerError: the broker was started without `acls=True`, or refused the request.
        """
        self._require_acls()
        pattern = ResourcePatternType.PREFIXED if prefix else ResourcePatternType.LITERAL
        named = [
            (ResourceType.TOPIC, topic, pattern),
            (ResourceType.GROUP, group, pattern),
            (ResourceType.TRANSACTIONAL_ID, transactional_id, pattern),
            (ResourceType.BROKER, _CLUSTER if cluster else None, ResourcePatternType.LITERAL),
        ]
        principal, everywhere, allowed = f"User:{_user_name(user)}", "*", AclPermissionType.ALLOW
        wanted: list[tuple[Any, ...]] = [
            (*resource, principal, everywhere, operation, allowed)
            for resource in named
            if resource[1] is not None
            for operation in map(_operation, operations)
        ]
        if not wanted:
            raise ConfigurationError(
                "a permission needs an operation and a resource: name operations, such as 'read', and "
                "topic=, group=, transactional_id= or cluster=True"
            )
        admins = [clients.admin(node.inside, {}) for node in self._answering()]
        _require_done("grant a permission", admins[0].create_acls([AclBinding(*each) for each in wanted]).values())
        exactly = [AclBindingFilter(*each) for each in wanted]

        def applied() -> bool:
            """Return whether all brokers know the permissions: the controller, which answered, knows them first."""
            requests = (admin.describe_acls(each) for admin in admins for each in exactly)
            return all(answered(request, _ANSWER_TIMEOUT_S) for request in requests)

        if not ask_again(applied, _ANSWER_TIMEOUT_S, _POLL_INTERVAL_S):
            raise DevBrokerError(
                f"the embedded broker did not grant a permission within {_ANSWER_TIMEOUT_S:g} s; "
                f"read its log {self.log_path}"
            )

    def asked(self, user: User | str) -> list[AskedRight]:
        """Return the permissions that the broker has checked for a user since its first start, each once, in order.

        These are the permissions that the user's requests need. Checks that only filter an answer, as of a list of all
        topics, are included only if they were allowed. Those of the first node come first.

        Raises:
            DevBrokerError: the broker was started without `acls=True`.
        """
        self._require_acls()
        logs = [node.authorizer_log_path for node in self._nodes]
        text = "".join(path.read_text(errors="replace") for path in logs if path.exists())
        # Thousands of lines belong to other users: the expression is only applied to this user's lines.
        lines = (line for line in text.splitlines() if f"Principal = User:{_user_name(user)} is " in line)
        permissions: dict[AskedRight, None] = {}
        for found in map(_AUDIT_LINE.search, lines):
            if found is not None:
                resource, allowed = _RESOURCES.get(found["resource"], found["resource"]), found["verdict"] == "Allowed"
                permissions[AskedRight(found["operation"], resource, found["name"], allowed, found["request"])] = None
        return list(permissions)

    def _register_users(self) -> None:
        if self._security is not None:
            for name in self._security.passwords if self._security.kind.has_passwords else (ADMIN,):
                self._register(self._security, name)

    def _register(self, security: ClientSecurity, name: str) -> dict[str, str]:
        """Register a user, wait until it can log in to each broker that can answer, and return its settings."""
        config = security.client_settings(name)
        if security.kind.has_passwords:
            secret = ScramCredentialInfo(ScramMechanism[MECHANISM.replace("-", "_")], _SCRAM_ITERATIONS)
            change = UserScramCredentialUpsertion(name, secret, security.passwords[name].encode())
            admin = clients.admin(self._answering()[0].inside, {})
            _require_done("create a user", admin.alter_user_scram_credentials([change]).values())
        deadline = time.monotonic() + max(_LOGIN_TIMEOUT_S, self._start_timeout_s)
        for node in self._answering():
            try:
                client = clients.admin(node.address, {**config, **SILENT})
                client.list_topics(timeout=max(0.1, deadline - time.monotonic()))
            except KafkaException as error:
                raise DevBrokerError(
                    f"the embedded broker at {node.address} does not accept a user's log-in: {reason(error)}; "
                    f"read its log {node.log_path}"
                ) from error
        return config

    def _require_acls(self) -> None:
        self._require_started()
        if not self._has_acls:
            raise DevBrokerError(
                "the embedded broker allows everything: it was started without acls=True; start it with that"
            )


def _user_name(user: User | str) -> str:
    return user.name if isinstance(user, User) else user


def _operation(name: str) -> AclOperation:
    known = [operation.name for operation in AclOperation if operation.name not in {"UNKNOWN", "ANY"}]
    if name.upper() not in known:
        raise ConfigurationError(f"an operation must be one of {', '.join(known)}, but is {name!r}")
    return AclOperation[name.upper()]


def _require_done(what: str, futures: Iterable[Future[Any]]) -> None:
    for future in futures:
        try:
            answered(future, _ANSWER_TIMEOUT_S)
        except KafkaException as error:
            raise DevBrokerError(f"the embedded broker did not {what}: {reason(error)}; read its log") from error
