"""Leaving the group where the client library raises: the app ends in order, and the log says why."""

from __future__ import annotations

import pytest
from confluent_kafka import KafkaError, KafkaException

from penstock.consumer.polling.group.membership import Membership


@pytest.mark.parametrize(
    "error",
    [
        KafkaException(KafkaError(KafkaError._TIMED_OUT)),
        RuntimeError("closed already"),
        SystemError("exception <class 'str'> is not a BaseException subclass"),
    ],
)
def test_what_the_library_raises_while_it_leaves_is_logged_and_ends_nothing(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    class Client:
        def close(self) -> None:
            raise error

    membership = object.__new__(Membership)
    membership.client = Client()  # type: ignore[assignment] # what is used of it

    membership.leave()

    assert "leaving the group: " in caplog.text
    assert "what was not committed is handled again" in caplog.text
