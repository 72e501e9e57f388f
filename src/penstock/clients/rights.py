"""Rights on a Kafka cluster: which one is missing, and the `kafka-acls` line that gives it.

A broker refuses by a code alone; each place that asks names the operation and the resource. The brokers are also asked
what a client may do, before it is refused, for some refusals never come: a heartbeat that is refused says nothing for a
whole session. With the description of a topic or a group they tell what the client may do with it (KIP-430), whatever
their authorizer is.
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


class MissingRightError(PenstockError, PermissionError):
    """A broker refused what its client has no right to.

    `what` was tried, as the beginning of a sentence: "messages cannot be sent to topic orders". The missing rights are
    to be given to `principal`, as `User:orders`.
    """

    #: What is missing.
    rights: tuple[Right, ...]

    def __init__(self, what: str, rights: Sequence[Right], principal: str) -> None:
        super().__init__(missing_right_text(what, rights, principal))
        self.rights = tuple(rights)

    @classmethod
    def from_text(cls, text: str, rights: tuple[Right, ...] = ()) -> MissingRightError:
        """Return one that was raised in another process; where its text alone is left, its rights stand in that."""
        error = cls.__new__(cls)
        PermissionError.__init__(error, text)
        error.rights = rights
        return error

    def __reduce__(self) -> tuple[Any, ...]:
        return MissingRightError.from_text, (str(self), self.rights)


def missing_right_text(what: str, rights: Sequence[Right], principal: str) -> str:
    """Return the sentence that tells what was tried, what is missing and the commands that give it."""
    return f"{what}: {lacking_text(rights, principal)}"


def lacking_text(rights: Sequence[Right], principal: str) -> str:
    """Return the part of it that tells what is missing and the commands that give it."""
    named = " and ".join(map(str, rights))
    commands = "; ".join(right.command(principal) for right in rights)
    return f"{principal} lacks the permission {named}; an administrator gives it with: {commands}"


def principal_of(config: ClientConfig) -> str:
    """Return whom the broker takes a client for, as far as its configuration tells."""
    user = config.get("sasl.username")
    return f"User:{user}" if user else THIS_CLIENT


#: Seconds that a broker may take to answer.
_ANSWER_S = 5.0
#: What every client may that gets an answer on a topic or a group.
_ALWAYS = "DESCRIBE"


@dataclass(frozen=True, slots=True)
class Rights:
    """What the brokers answered."""

    #: Rights that were asked for and that the client has.
    held: tuple[Right, ...] = ()
    #: Those that it lacks.
    missing: tuple[Right, ...] = ()
    #: Those without an answer: there is no such topic, or the brokers do not tell rights.
    unknown: tuple[Right, ...] = ()


def ask_rights(admin: AdminClient, needed: Iterable[Right], timeout_s: float = _ANSWER_S) -> Rights:
    """Return what brokers tell of the rights of this client; `KafkaException` where the client library refuses to ask.

    Where rights on groups are asked for, `admin` is of this question alone: see `clients.groups`.
    """
    wanted = list(dict.fromkeys(needed))
    # Brokers are not asked about what can be no name: some such texts end the process within the client library.
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
    # An answer without what every client may that gets one is none.
    operations = {place: names for place, names in operations.items() if _ALWAYS in names}
    operations |= {place: set() for place, error in failed.items() if is_missing_right(error)}

    def is_held(right: Right) -> bool | None:
        allowed = operations.get((right.resource, right.name))
        return None if allowed is None else right.operation.name in allowed

    return Rights(*(tuple(right for right in wanted if is_held(right) is answer) for answer in (True, False, None)))


def require_rights(admin: AdminClient, what: str, needed: Iterable[Right], timeout_s: float = _ANSWER_S) -> None:
    """Raise where a client lacks rights: tried instead, each would fail with a code, and some with a misleading one.

    `what` cannot be done without them, as the beginning of a sentence. What brokers tell nothing of is passed over: the
    use itself tells. `KafkaException` where the client library refused to ask, `MissingRightError` names all missing.
    """
    if missing := ask_rights(admin, needed, timeout_s).missing:
        raise MissingRightError(what, missing, principal_of(admin.config))
