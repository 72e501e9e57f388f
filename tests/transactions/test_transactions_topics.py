"""The store's topics before they are used: leaders that are not known yet, brokers that do not answer."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from confluent_kafka import KafkaError, KafkaException

from penstock.errors import BrokerConnectionError
from penstock.transactions import topics as topics_module
from penstock.transactions.topics import _await_leaders


class ScriptedAdmin:
    """An admin client that gives prepared answers; the last one stays."""

    def __init__(self, *answers: object) -> None:
        self.answers = list(answers)

    def list_topics(self, *, timeout: float) -> object:  # noqa: ARG002 - the client's name for it
        answer = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        if isinstance(answer, Exception):
            raise answer
        return answer


def leaders(*numbers: int) -> SimpleNamespace:
    partitions = {place: SimpleNamespace(leader=number, error=None) for place, number in enumerate(numbers)}
    return SimpleNamespace(topics={"store.half": SimpleNamespace(partitions=partitions)})


def test_leaders_are_waited_for_past_answers_that_do_not_come() -> None:
    silence = KafkaException(KafkaError(KafkaError._TRANSPORT))
    admin = ScriptedAdmin(SimpleNamespace(topics={}), silence, leaders(1, -1), leaders(1, 1))

    _await_leaders(admin, "127.0.0.1:1", ["store.half"])  # type: ignore[arg-type] # what is used of it

    assert len(admin.answers) == 1


@pytest.mark.parametrize("last", [KafkaException(KafkaError(KafkaError._TRANSPORT)), leaders(1, -1)])
def test_topics_without_a_leader_are_named_when_the_time_is_over(last: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(topics_module, "CONNECT_TIMEOUT_S", 0.2)

    with pytest.raises(BrokerConnectionError, match=r"store\.half at 127\.0\.0\.1:1 had no leader for 0\.2 s"):
        _await_leaders(ScriptedAdmin(last), "127.0.0.1:1", ["store.half"])  # type: ignore[arg-type] # as above
