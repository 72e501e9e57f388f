"""Permissions on a secured broker, as values: given, removed, and compared with the requested ones."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from confluent_kafka.admin import (
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    AdminClient,
    ResourcePatternType,
    ResourceType,
)

from penstock import clients
from penstock.devbroker import DevBroker, User
from waiting import wait_until

#: Seconds in which brokers answer an administrator.
_ANSWER_S = 60.0


@dataclass(frozen=True, slots=True, order=True)
class Right:
    """One operation on one resource; `on_topic` and its like make them.

    Attributes:
        resource: `topic`, `group`, `transactional_id` or `cluster`, as `DevBroker.allow` names them.
        name: name of the resource; of the cluster it is `kafka-cluster`.
        operation: Kafka's name of the operation.
        is_prefix: whether the name is the beginning of names.
    """

    resource: str
    name: str
    operation: str
    is_prefix: bool = False


def on_topic(name: str, *operations: str, prefix: bool = False) -> list[Right]:
    return [Right("topic", name, operation, prefix) for operation in operations]


def on_group(name: str, *operations: str, prefix: bool = False) -> list[Right]:
    return [Right("group", name, operation, prefix) for operation in operations]


def on_transactional_id(name: str, *operations: str, prefix: bool = False) -> list[Right]:
    return [Right("transactional_id", name, operation, prefix) for operation in operations]


def on_cluster(*operations: str) -> list[Right]:
    return [Right("cluster", "kafka-cluster", operation) for operation in operations]


def give(broker: DevBroker, user: User, rights: Iterable[Right]) -> None:
    """Give the rights and return when they hold."""
    for right in rights:
        if right.resource == "cluster":
            broker.allow(user, right.operation, cluster=True)
        else:
            broker.allow(user, right.operation, prefix=right.is_prefix, **{right.resource: right.name})


def take(broker: DevBroker, user: User, rights: Iterable[Right]) -> None:
    """Take rights again that were given so, and return when they no longer hold."""
    admin = AdminClient({"bootstrap.servers": broker.bootstrap_servers, **broker.admin_config})
    filters = [_filter(user, right) for right in rights]
    for future in admin.delete_acls(filters).values():
        future.result(_ANSWER_S)
    # Every broker applies it a moment later.
    inside = [clients.admin(node.inside, {}) for node in broker._answering()]
    wait_until(lambda: not any(own.describe_acls(each).result(_ANSWER_S) for own in inside for each in filters))


def _filter(user: User, right: Right) -> AclBindingFilter:
    kind = ResourceType.BROKER if right.resource == "cluster" else ResourceType[right.resource.upper()]
    pattern = ResourcePatternType.PREFIXED if right.is_prefix else ResourcePatternType.LITERAL
    operation = AclOperation[right.operation.upper()]
    return AclBindingFilter(kind, right.name, pattern, f"User:{user.name}", "*", operation, AclPermissionType.ALLOW)
