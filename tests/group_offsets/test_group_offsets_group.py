"""Errors of a group's brokers: temporary ones are retried, all others are raised."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import Future
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException

from fake_admin import FakeAdmin
from penstock.clients.rights import MissingRightError
from penstock.errors import BrokerConnectionError, ConfigurationError, PenstockError
from penstock.group_offsets import group as module
from penstock.group_offsets.group import Group, GroupState
from penstock.group_offsets.planning import change
from penstock.group_offsets.positions import Position

PART = ("orders", 0)
BEFORE = Position(*PART, 5, range(10))


class CommittingAdmin(FakeAdmin):
    """An admin client whose answers to a commit are given, one after the other, the last for ever."""

    config = MappingProxyType({"sasl.username": "ops"})

    def __init__(self, *answers: int | None) -> None:
        self._answers = answers
        self.asked = 0

    def alter_consumer_group_offsets(self, asked: list[Any], **_: object) -> Mapping[str, Future[Any]]:
        code = self._answers[min(self.asked, len(self._answers) - 1)]
        self.asked += 1
        answer: Future[Any] = Future()
        if code is not None and code < 0:
            answer.set_exception(KafkaException(KafkaError(code)))
        else:
            error = None if code is None else KafkaError(code)
            row = SimpleNamespace(topic=PART[0], partition=PART[1], error=error)
            answer.set_result(SimpleNamespace(topic_partitions=[row]))
        return {asked[0].group_id: answer}


def write(monkeypatch: pytest.MonkeyPatch, *answers: int | None, budget_s: float = 0.2) -> int:
    """Commit an offset by an admin client that answers so; return how often it was asked."""
    monkeypatch.setattr(module, "_RETRY_BUDGET_S", budget_s)
    monkeypatch.setattr(module, "_RETRY_DELAY_S", 0.01)
    group, admin = Group("127.0.0.1:1", {"log_level": 0, "sasl.username": "ops"}, "sms"), CommittingAdmin(*answers)
    monkeypatch.setattr(group, "_admin", admin)
    group.write(GroupState("sms", "empty", (), (BEFORE,)), [change("sms", BEFORE, 3)])
    return admin.asked


@pytest.mark.parametrize("name", ["", " ", "shop\0", "\udcff"])
def test_a_group_that_is_no_name_is_refused_and_costs_no_process(name: str) -> None:
    with pytest.raises(ConfigurationError, match="the group must be a name"):
        Group("127.0.0.1:1", {}, name)


def test_what_may_pass_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    passing = KafkaError._TRANSPORT, KafkaError._TIMED_OUT, KafkaError.COORDINATOR_LOAD_IN_PROGRESS, None

    assert write(monkeypatch, *passing, budget_s=60.0) == 4


@pytest.mark.parametrize(
    ("code", "kind", "says"),
    [
        (KafkaError._TRANSPORT, BrokerConnectionError, "by 127.0.0.1:1: .*check that the brokers run"),
        (
            KafkaError.COORDINATOR_NOT_AVAILABLE,
            BrokerConnectionError,
            "offsets of orders:0 were refused, and 0 written by 127.0.0.1:1: .*check that the brokers run",
        ),
        (KafkaError._INVALID_ARG, PenstockError, "group sms may be changed or not: "),
        (KafkaError.UNKNOWN_MEMBER_ID, PenstockError, "stop all members"),
        (KafkaError.STALE_MEMBER_EPOCH, PenstockError, "stop all members"),
        (KafkaError.OFFSET_METADATA_TOO_LARGE, PenstockError, "offset.metadata.max.bytes to 4096"),
        (
            KafkaError.TOPIC_AUTHORIZATION_FAILED,
            MissingRightError,
            "offsets of orders:0 were refused, and 0 written: .*Read on group sms and Read on topic orders",
        ),
        (KafkaError.GROUP_AUTHORIZATION_FAILED, MissingRightError, "User:ops lacks"),
    ],
)
def test_what_does_not_pass_is_reported_with_what_to_do(
    monkeypatch: pytest.MonkeyPatch, code: int, kind: type[PenstockError], says: str
) -> None:
    with pytest.raises(kind, match=says) as raised:
        write(monkeypatch, code)

    assert type(raised.value) is kind
