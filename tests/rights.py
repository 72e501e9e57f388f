"""Rights on a secured broker, as values: given to a user, taken again, and compared with what was asked for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from penstock.devbroker import DevBroker, User


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
    for right in rights:
        if right.resource == "cluster":
            broker.disallow(user, right.operation, cluster=True)
        else:
            broker.disallow(user, right.operation, prefix=right.is_prefix, **{right.resource: right.name})
