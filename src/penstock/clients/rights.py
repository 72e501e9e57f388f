"""Permissions on a Kafka cluster: which one is missing, and the `kafka-acls` command that gives it.

A broker refuses with a bare code, so each caller names the operation and the resource. Brokers are also asked for the
permissions beforehand (KIP-430), because some refusals never arrive: a refused heartbeat reports nothing for a whole
session. Their answer comes with the description of a topic or group, whatever their authorizer is.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from enum import Enum
from typing import Any

from confluent_kafka import TopicCollection

from penstock.clients.answers import all_answered
from penstock.clients.factory import AdminClient
from penstock.clients.groups import describe_groups
from penstock.clients.kafka_errors import is_missing_right
from penstock.errors import PenstockError
from penstock.options import ClientConfig, is_client_text
from penstock.outgoing import is_topic_name

#: The principal in commands if the configuration does not name it, as with certificates and tokens.
THIS_CLIENT = "User:<this client>"


class Resource(Enum):
    """Kinds of resources, by their option of `kafka-acls`."""

    TOPIC = "topic"
    GROUP = "group"
    TRANSACTIONAL_ID = "transactional-id"
    CLUSTER = "cluster"


class Operation(Enum):
    """Operations, as `kafka-acls` spells them."""

    READ = "Read"
    WRITE = "Write"
    CREATE = "Create"
    DELETE = "Delete"
    ALTER = "Alter"
    DESCRIBE = "Describe"
    ALTER_CONFIGS = "AlterConfigs"
    DESCRIBE_CONFIGS = "DescribeConfigs"
    IDEMPOTENT_WRITE = "IdempotentWrite"


@dataclass(frozen=True, slots=True)
class Right:
    """A permission of a client on a cluster."""

    operation: Operation
    resource: Resource
    #: The name of the resource; empty for the cluster.
    name: str = ""
    #: Whether it covers all resources whose names begin with `name`.
    is_prefix: bool = False

    def __str__(self) -> str:
        """Return it as text for a sentence: `Write on topic orders`."""
        name = f"{self.name}*" if self.is_prefix else self.name
        return f"{self.operation.value} on {self.resource.value} {name}".rstrip()

    def command(self, principal: str) -> str:
        """Return the command that gives this permission to `principal`."""
        resource = f"--{self.resource.value}"
        if self.resource is not Resource.CLUSTER:
            resource += f" '{self.name}'" + (" --resource-pattern-type prefixed" if self.is_prefix else "")
        return (
            f"kafka-acls.sh --bootstrap-server ... --add --allow-principal '{principal}' "
            f"--operation {self.operation.value} {resource}"
        )


def topic_right(operation: Operation, topic: str) -> Right:
    """Return a permission on a topic."""
    return Right(operation, Resource.TOPIC, topic)


def group_right(group: str, operation: Operation = Operation.READ) -> Right:
    """Return a permission on a consumer group; by default to join it and commit its offsets."""
    return Right(operation, Resource.GROUP, group)


def transactional_right(prefix: str) -> Right:
    """Return the permission to publish under all transactional ids with this prefix. It includes Describe."""
    return Right(Operation.WRITE, Resource.TRANSACTIONAL_ID, prefix, is_prefix=True)


class MissingRightError(PenstockError, PermissionError):
    """A broker refused a request for want of permission.

    `what` is the beginning of a sentence: "messages cannot be sent to topic orders". The missing permissions must be
    given to `principal`, for example `User:orders`.
    """

    #: The missing permissions.
    rights: tuple[Right, ...]

    def __init__(self, what: str, rights: Sequence[Right], principal: str) -> None:
        super().__init__(missing_right_text(what, rights, principal))
        self.rights = tuple(rights)

    @classmethod
    def from_text(cls, text: str, rights: tuple[Right, ...] = ()) -> MissingRightError:
        """Return an error that was raised in another process. Without `rights`, its text still names them."""
        error = cls.__new__(cls)
        PermissionError.__init__(error, text)
        error.rights = rights
        return error

    def __reduce__(self) -> tuple[Any, ...]:
        return MissingRightError.from_text, (str(self), self.rights)


def missing_right_text(what: str, rights: Sequence[Right], principal: str) -> str:
    """Return the sentence with the attempt, the missing permissions and the commands that give them."""
    return f"{what}: {lacking_text(rights, principal)}"


def lacking_text(rights: Sequence[Right], principal: str) -> str:
    """Return the missing permissions and the commands that give them, as the end of a sentence."""
    named = " and ".join(map(str, rights))
    commands = "; ".join(right.command(principal) for right in rights)
    return f"{principal} lacks the permission {named}; an administrator gives it with: {commands}"


def principal_of(config: ClientConfig) -> str:
    """Return the principal of a client, as far as its configuration names it."""
    user = config.get("sasl.username")
    return f"User:{user}" if user else THIS_CLIENT


#: Seconds that a broker may take to answer.
_ANSWER_S = 5.0
#: Every client that gets a description of a topic or group has this permission.
_ALWAYS = "DESCRIBE"


@dataclass(frozen=True, slots=True)
class Rights:
    """The brokers' answer about permissions."""

    #: Permissions that the client has.
    held: tuple[Right, ...] = ()
    #: Permissions that it lacks.
    missing: tuple[Right, ...] = ()
    #: Permissions without an answer: there is no such topic, or the brokers do not report permissions.
    unknown: tuple[Right, ...] = ()


def ask_rights(admin: AdminClient, needed: Iterable[Right], timeout_s: float = _ANSWER_S) -> Rights:
    """Return which of these permissions the client has; `KafkaException` if the client library refuses to ask.

    For permissions on groups, make `admin` for this question alone: see `clients.groups`.
    """
    wanted = list(dict.fromkeys(needed))
    # Texts that cannot be names are not asked about: some of them end the process within the client library.
    topics, groups = (
        list(dict.fromkeys(right.name for right in wanted if right.resource is kind and is_name(right.name)))
        for kind, is_name in ((Resource.TOPIC, is_topic_name), (Resource.GROUP, is_client_text))
    )
    asked: dict[tuple[Resource, str], Future[Any]] = {}
    if topics:
        names = TopicCollection(topics)
        found = admin.describe_topics(names, request_timeout=timeout_s, include_authorized_operations=True)
        asked |= {(Resource.TOPIC, name): future for name, future in found.items()}
    if groups:
        found = describe_groups(admin, groups, with_rights=True)
        asked |= {(Resource.GROUP, name): future for name, future in found.items()}
    described, failed = all_answered(asked, timeout_s)
    operations = {
        place: {operation.name for operation in about.authorized_operations or ()} for place, about in described.items()
    }
    # An answer without the permission that every described resource implies is no answer.
    operations = {place: names for place, names in operations.items() if _ALWAYS in names}
    operations |= {place: set() for place, error in failed.items() if is_missing_right(error)}

    def is_held(right: Right) -> bool | None:
        allowed = operations.get((right.resource, right.name))
        return None if allowed is None else right.operation.name in allowed

    return Rights(*(tuple(right for right in wanted if is_held(right) is answer) for answer in (True, False, None)))


def require_rights(admin: AdminClient, what: str, needed: Iterable[Right], timeout_s: float = _ANSWER_S) -> None:
    """Raise `MissingRightError` with all permissions that a client lacks. Attempts would fail with misleading codes.

    `what` is the beginning of the error's sentence. Permissions without an answer are passed over: their use will tell.
    Raises `KafkaException` if the client library refuses to ask.
    """
    if missing := ask_rights(admin, needed, timeout_s).missing:
        raise MissingRightError(what, missing, principal_of(admin.config))
