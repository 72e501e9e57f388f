"""A transactional producer is initialised once a connection stands, and says why it cannot be in its own words."""

from __future__ import annotations

from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException

from penstock.clients.transactional.settings import initialise


class Called:
    """Records its requests; a test chooses when brokers are away."""

    def __init__(self, *, away: bool) -> None:
        self.away = away
        self.calls: list[tuple[Any, ...]] = []

    def list_topics(self, topic: str, timeout: float) -> None:
        self.calls.append(("list_topics", topic, timeout))
        if self.away:
            raise KafkaException(KafkaError(KafkaError._TRANSPORT))

    def init_transactions(self, timeout: float) -> None:
        self.calls.append(("init_transactions", timeout))
        if self.away:
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT))


def test_where_brokers_are_away_the_initialisation_says_so() -> None:
    producer: Any = Called(away=True)

    with pytest.raises(KafkaException) as raised:
        initialise(producer, "log", 0.5)

    assert raised.value.args[0].code() == KafkaError._TIMED_OUT
    assert producer.calls == [("list_topics", "log", 0.5), ("init_transactions", 0.5)]
