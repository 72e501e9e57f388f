"""Rights on a Kafka cluster: which one is missing, and the `kafka-acls` line that gives it.

A broker refuses by a code alone; each place that asks names the operation and the resource.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

from penstock.errors import PenstockError
from penstock.options import ClientConfig

#: Stands for the principal where the configuration does not tell it, as with certificates and tokens.
THIS_CLIENT = "User:<this client>"


class Resource(Enum):
    """What a right is held on, by the option of `kafka-acls` that names it."""

    TOPIC = "topic"
    GROUP = "group"
    TRANSACTIONAL_ID = "transactional-id"
    CLUSTER = "cluster"


class Operation(Enum):
    """What a right allows, as `kafka-acls` spells it."""

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
    """A right of a client on a cluster."""

    operation: Operation
    resource: Resource
    #: Its name; empty for the cluster.
    name: str = ""
    #: Whether it is held on all that begin with that name.
    is_prefix: bool = False

    def __str__(self) -> str:
        """Return it as it stands in a sentence: `Write on topic orders`."""
        name = f"{self.name}*" if self.is_prefix else self.name
        return f"{self.operation.value} on {self.resource.value} {name}".rstrip()

    def command(self, principal: str) -> str:
        """Return the command that gives it to `principal`."""
        resource = f"--{self.resource.value}"
        if self.resource is not Resource.CLUSTER:
            resource += f" '{self.name}'" + (" --resource-pattern-type prefixed" if self.is_prefix else "")
        return (
            f"kafka-acls.sh --bootstrap-server ... --add --allow-principal '{principal}' "
            f"--operation {self.operation.value} {resource}"
        )


def topic_right(operation: Operation, topic: str) -> Right:
    """Return a right on a topic."""
    return Right(operation, Resource.TOPIC, topic)


def group_right(group: str, operation: Operation = Operation.READ) -> Right:
    """Return a right on a consumer group: to join it and commit its offsets, where nothing else is said."""
    return Right(operation, Resource.GROUP, group)


def transactional_right(prefix: str) -> Right:
    """Return the right to publish under all transactional ids that begin so; it holds the right to Describe them."""
    return Right(Operation.WRITE, Resource.TRANSACTIONAL_ID, prefix, is_prefix=True)


class Grantable(Protocol):
    """A right that an administrator gives with one command: a `Right`, or one of another system."""

    def __str__(self) -> str:
        """Return it as it stands in a sentence."""

    def command(self, principal: str, /) -> str:
        """Return the command that gives it to `principal`."""


class MissingRightError(PenstockError, PermissionError):
    """A broker, or a database, refused what its client has no right to.

    `what` was tried, as the beginning of a sentence: "messages cannot be sent to topic orders". The missing rights are
    to be given to `principal`, as `User:orders`.
    """

    #: What is missing.
    rights: tuple[Grantable, ...]

    def __init__(self, what: str, rights: Sequence[Grantable], principal: str) -> None:
        super().__init__(missing_right_text(what, rights, principal))
        self.rights = tuple(rights)

    @classmethod
    def from_text(cls, text: str, rights: tuple[Grantable, ...] = ()) -> MissingRightError:
        """Return one that was raised in another process; where its text alone is left, its rights stand in that."""
        error = cls.__new__(cls)
        PermissionError.__init__(error, text)
        error.rights = rights
        return error

    def __reduce__(self) -> tuple[Any, ...]:
        return MissingRightError.from_text, (str(self), self.rights)


def missing_right_text(what: str, rights: Sequence[Grantable], principal: str) -> str:
    """Return the sentence that tells what was tried, what is missing and the commands that give it."""
    return f"{what}: {lacking_text(rights, principal)}"


def lacking_text(rights: Sequence[Grantable], principal: str) -> str:
    """Return the part of it that tells what is missing and the commands that give it."""
    named = " and ".join(map(str, rights))
    commands = "; ".join(right.command(principal) for right in rights)
    return f"{principal} lacks the right {named}; an administrator gives it with: {commands}"


def principal_of(config: ClientConfig) -> str:
    """Return whom the broker takes a client for, as far as its configuration tells."""
    user = config.get("sasl.username")
    return f"User:{user}" if user else THIS_CLIENT
