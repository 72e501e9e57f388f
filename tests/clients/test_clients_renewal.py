"""The cause of a producer client's fatal failure. The tests of the outbox have its replacement."""

from __future__ import annotations

import pytest
from confluent_kafka import KafkaError, KafkaException

from penstock.clients.renewal import cause_of
from penstock.testing import TestBroker

#: What a broker answers to a client that may write nowhere and asks for the id of an idempotent producer.
REFUSED = KafkaError(KafkaError.CLUSTER_AUTHORIZATION_FAILED, "no id is given", fatal=True)


def test_the_cause_of_a_failed_client_is_read_once_it_says_only_that_it_failed() -> None:
    broker = TestBroker()
    broker.create_topic("t", 1)
    client = broker.producer({})
    broker.fail("produce", REFUSED)
    client.produce("t", b"1", b"k")
    with pytest.raises(KafkaException) as raised:
        client.produce("t", b"2", b"k")

    assert raised.value.args[0].code() == KafkaError._FATAL
    assert cause_of(raised.value, client.poll).code() == KafkaError.CLUSTER_AUTHORIZATION_FAILED
    assert cause_of(raised.value, client.poll).code() == KafkaError._FATAL
