"""What the error of a message in a Kafka transaction is blamed on."""

from __future__ import annotations

import pytest
from confluent_kafka import KafkaError

from penstock.clients.transactional.faults import Blame, Blamed, blamed


@pytest.mark.parametrize(
    ("code", "found"),
    [
        (KafkaError.MSG_SIZE_TOO_LARGE, Blamed.MESSAGE),
        # The partition that a message names. Others of its topic must not suffer.
        (KafkaError._UNKNOWN_PARTITION, Blamed.MESSAGE),
        (KafkaError._UNKNOWN_TOPIC, Blamed.TOPIC),
        (KafkaError.UNKNOWN_TOPIC_OR_PART, Blamed.TOPIC),
        (KafkaError.TOPIC_AUTHORIZATION_FAILED, Blamed.TOPIC),
        (KafkaError._MSG_TIMED_OUT, Blamed.SILENCE),
        (KafkaError._PURGE_QUEUE, Blamed.PURGED),
        (KafkaError._FENCED, Blamed.NOBODY),
    ],
)
def test_an_error_is_blamed_on_what_causes_it(code: int, found: Blamed) -> None:
    assert blamed(KafkaError(code)) is found


@pytest.mark.parametrize(("transaction", "words"), [("7", "the message of transaction 7"), ("", "a message")])
def test_a_cause_names_the_transaction_of_a_message_if_it_has_one(transaction: str, words: str) -> None:
    blame = Blame("")

    blame.add(transaction, "out", KafkaError(KafkaError._UNKNOWN_PARTITION), "no such partition")

    assert blame.cause == f"{words} is refused: out: no such partition"
