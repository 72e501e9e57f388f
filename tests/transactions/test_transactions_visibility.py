"""The wait until committed readers see a published message."""

from __future__ import annotations

from concurrent.futures import Future
from unittest import mock

from confluent_kafka import TopicPartition

from penstock.transactions.publishing import publisher
from penstock.transactions.publishing.publisher import Visibility


def test_a_client_that_does_not_answer_is_waited_for_no_longer_than_the_limit_and_ends_nothing() -> None:
    admin = mock.Mock()
    unanswered: Future[object] = Future()
    admin.list_offsets.return_value = {TopicPartition("done", 0): unanswered}

    with (
        mock.patch.object(publisher, "_ANSWER_S", 0.01),
        mock.patch.object(publisher, "_MAX_WAIT_S", 0.05),
    ):
        Visibility(admin, ("done", 0)).wait({("done", 0): 7})

    assert admin.list_offsets.called
