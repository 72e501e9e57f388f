"""Missing permissions: the error, and the command that gives them."""

from __future__ import annotations

import pickle

from penstock.clients.rights import (
    MissingRightError,
    Operation,
    Resource,
    Right,
    group_right,
    principal_of,
    topic_right,
    transactional_right,
)
from penstock.errors import PenstockError


def test_a_missing_right_names_operation_resource_and_the_command_that_gives_it() -> None:
    error = MissingRightError(
        "messages cannot be sent to topic orders", [topic_right(Operation.WRITE, "orders")], "User:shop"
    )
    assert str(error) == (
        "messages cannot be sent to topic orders: User:shop lacks the permission Write on topic orders; an "
        "administrator gives it with: kafka-acls.sh --bootstrap-server ... --add --allow-principal 'User:shop' "
        "--operation Write --topic 'orders'"
    )
    assert isinstance(error, PenstockError)
    assert isinstance(error, PermissionError)


def test_a_right_on_the_cluster_has_no_name() -> None:
    right = Right(Operation.IDEMPOTENT_WRITE, Resource.CLUSTER)
    assert str(right) == "IdempotentWrite on cluster"
    assert right.command("User:a").endswith("--operation IdempotentWrite --cluster")
    assert group_right("sms").command("User:a").endswith("--operation Read --group 'sms'")


def test_the_principal_is_the_user_where_the_configuration_tells_one() -> None:
    assert principal_of({"sasl.username": "orders"}) == "User:orders"
    assert principal_of({}) == "User:<this client>"


def test_an_error_keeps_its_text_and_its_rights_on_its_way_between_processes() -> None:
    error = MissingRightError("orders cannot be sent", [transactional_right("q/")], "User:shop")

    back = pickle.loads(pickle.dumps(error))  # noqa: S301 - our own

    assert (str(back), back.rights) == (str(error), error.rights)
    assert isinstance(back, MissingRightError)
    assert str(MissingRightError.from_text(str(error))) == str(error)


def test_a_right_on_a_prefix_says_so() -> None:
    right = transactional_right("q/")
    assert str(right) == "Write on transactional-id q/*"
    assert right.command("User:a").endswith("--transactional-id 'q/' --resource-pattern-type prefixed")


def test_the_public_names_of_rights_are_spelled_as_kafka_acls_spells_them() -> None:
    assert (Operation.IDEMPOTENT_WRITE.value, Resource.CLUSTER.value) == ("IdempotentWrite", "cluster")
