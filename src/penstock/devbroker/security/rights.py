"""Rights of users on an embedded broker: given through the admin API, and read from the authorizer's log."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
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
    AdminClient,
    ResourcePatternType,
    ResourceType,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialUpsertion,
)

from penstock.clients.answers import answered
from penstock.clients.bounded_calls import ask_again
from penstock.clients.kafka_errors import reason
from penstock.devbroker.security.protocols import MECHANISM
from penstock.errors import ConfigurationError, DevBrokerError

#: Seconds a broker may take to do what an administrator asks, and to apply it.
_ANSWER_TIMEOUT_S = 30.0
_LOOK_INTERVAL_S = 0.005

#: The fewest that Kafka takes: these passwords guard nothing.
_SCRAM_ITERATIONS = 4096

#: Kafka's name of the one cluster there is to have rights on.
_CLUSTER = "kafka-cluster"

_RESOURCES = {"Topic": "topic", "Group": "group", "TransactionalId": "transactional_id", "Cluster": "cluster"}

#: A line of Kafka's `StandardAuthorizerData.buildAuditMessage`.
_ASKED = re.compile(
    r"Principal = User:(?P<user>.+?) is (?P<verdict>Allowed|Denied) operation = (?P<operation>\w+) "
    r"from host = \S+ on resource = (?P<resource>\w+):LITERAL:(?P<name>.*?) for request = (?P<request>\w+) "
)


@dataclass(frozen=True, slots=True)
class AskedRight:
    """A right that the broker looked up for a user because a request needed it."""

    #: Kafka's name of the operation, as `READ`.
    operation: str
    #: `topic`, `group`, `transactional_id` or `cluster`.
    resource: str
    #: Name of the resource; of the cluster it is `kafka-cluster`.
    name: str
    #: Whether the user had it.
    allowed: bool
    #: Kafka's name of the request that needed it, as `Fetch`.
    request: str


class Rights:
    """Gives rights, makes users, and waits until the brokers have applied it. For one thread at a time."""

    def __init__(self, admins: Sequence[AdminClient]) -> None:
        #: One of each broker: each has to have applied what the first is asked to do.
        self._admins = admins
        self._admin = admins[0]

    def allow(self, bindings: Iterable[AclBinding]) -> None:
        """Give rights and wait until the broker's authorizer has them."""
        wanted = list(bindings)
        _done("give a right", self._admin.create_acls(wanted).values())
        # The authorizer of the controller, in the same process, knows before that of the broker, which answers here.
        applied = lambda: all(all(self._found(binding)) for binding in wanted)  # noqa: E731 - short
        if not ask_again(applied, _ANSWER_TIMEOUT_S, _LOOK_INTERVAL_S):
            raise DevBrokerError(
                f"the embedded broker did not give a right within {_ANSWER_TIMEOUT_S:g} s; read its log"
            )

    def set_password(self, user: str, password: str) -> None:
        """Let the user log in with the password. The broker applies it a moment later."""
        kind = ScramMechanism[MECHANISM.replace("-", "_")]
        change = UserScramCredentialUpsertion(user, ScramCredentialInfo(kind, _SCRAM_ITERATIONS), password.encode())
        _done("make a user", self._admin.alter_user_scram_credentials([change]).values())

    def _found(self, binding: AclBinding) -> Iterator[bool]:
        for admin in self._admins:
            yield bool(answered(admin.describe_acls(_exactly(binding)), _ANSWER_TIMEOUT_S))


def bindings(
    user: str,
    operations: Iterable[str],
    topic: str | None,
    group: str | None,
    transactional_id: str | None,
    *,
    cluster: bool,
    prefix: bool,
) -> Iterator[AclBinding]:
    """Return Kafka's bindings for each operation on each resource; `ConfigurationError` where either is not named."""
    named = [
        (ResourceType.TOPIC, topic),
        (ResourceType.GROUP, group),
        (ResourceType.TRANSACTIONAL_ID, transactional_id),
        (ResourceType.BROKER, _CLUSTER if cluster else None),
    ]
    resources = [(kind, name) for kind, name in named if name is not None]
    wanted = [_operation(name) for name in operations]
    if not resources or not wanted:
        raise ConfigurationError(
            "a right is an operation on something: name operations, as 'read', and "
            "topic=, group=, transactional_id= or cluster=True"
        )
    pattern = ResourcePatternType.PREFIXED if prefix else ResourcePatternType.LITERAL
    return (
        AclBinding(
            kind,
            name,
            ResourcePatternType.LITERAL if kind is ResourceType.BROKER else pattern,
            f"User:{user}",
            "*",
            operation,
            AclPermissionType.ALLOW,
        )
        for kind, name in resources
        for operation in wanted
    )


def asked_rights(log_paths: Iterable[Path], user: str) -> list[AskedRight]:
    """Return what was looked up for the user so far, each once, in the order of the first times."""
    text = "".join(path.read_text(errors="replace") for path in log_paths if path.exists())
    # Thousands of lines are others': the expression looks at this user's alone.
    lines = (line for line in text.splitlines() if f"Principal = User:{user} is " in line)
    asked: dict[AskedRight, None] = {}
    for match in map(_ASKED.search, lines):
        if match is not None:
            resource, allowed = _RESOURCES.get(match["resource"], match["resource"]), match["verdict"] == "Allowed"
            asked[AskedRight(match["operation"], resource, match["name"], allowed, match["request"])] = None
    return list(asked)


def _operation(name: str) -> AclOperation:
    known = [operation.name for operation in AclOperation if operation.name not in {"UNKNOWN", "ANY"}]
    if name.upper() not in known:
        raise ConfigurationError(f"an operation must be one of {', '.join(known)}, but is {name!r}")
    return AclOperation[name.upper()]


def _exactly(binding: AclBinding) -> AclBindingFilter:
    return AclBindingFilter(
        binding.restype,
        binding.name,
        binding.resource_pattern_type,
        binding.principal,
        binding.host,
        binding.operation,
        binding.permission_type,
    )


def _done(what: str, futures: Iterable[Future[Any]]) -> None:
    for future in futures:
        try:
            answered(future, _ANSWER_TIMEOUT_S)
        except KafkaException as error:
            raise DevBrokerError(f"the embedded broker did not {what}: {reason(error)}; read its log") from error
