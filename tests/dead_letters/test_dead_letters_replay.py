"""The errors of a replay if several things fail at once, with a fake log and producer."""

from __future__ import annotations

from typing import Any

import pytest
from confluent_kafka import KafkaError, KafkaException

from penstock.clients.rights import Operation, topic_right
from penstock.dead_letters.headers import DeadLetterOrigin
from penstock.dead_letters.reader import DeadLetter, DeadLetterLog
from penstock.dead_letters.replay import Replay, Selection
from penstock.errors import PenstockError, TopicNotFoundError
from penstock.group_offsets.positions import Position

LETTERS = [DeadLetter("dlq", 0, n, b"k", b"v", [], 1, DeadLetterOrigin("orders", 0)) for n in range(2)]


class Producer:
    """Acknowledges the first message, and no other."""

    def __init__(self) -> None:
        self._answers = [None, KafkaError(KafkaError.MSG_SIZE_TOO_LARGE)]

    def produce(self, *_: object, on_delivery: Any, **__: object) -> None:
        on_delivery(self._answers.pop(0), None)

    def poll(self, _timeout_s: float) -> None: ...

    def __len__(self) -> int:
        return 0


def refuse(*_: object) -> None:
    refusal = KafkaException(KafkaError(KafkaError.COORDINATOR_NOT_AVAILABLE))
    raise PenstockError("could not be written down") from refusal


def test_what_was_not_sent_stays_known_where_what_was_sent_cannot_be_written_down(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    log = DeadLetterLog("127.0.0.1:1", {"log_level": 0})
    producer = Producer()
    monkeypatch.setattr(log, "partitions", lambda _topic: 1)
    monkeypatch.setattr(log, "topics", lambda: ["orders"])
    monkeypatch.setattr(log, "bounds", lambda *_: (0, 2))
    monkeypatch.setattr(log, "replayed", lambda *_: Position("dlq", 0, None, range(2)))
    monkeypatch.setattr(log, "read", lambda *_: iter([LETTERS]))
    monkeypatch.setattr(log, "store_progress", refuse)
    monkeypatch.setattr(Replay, "_connect", lambda _self: producer)
    monkeypatch.setattr(Replay, "_why_no_target", lambda _self, _target: None)

    with log, pytest.raises(PenstockError, match="could not be written down") as caught:
        Replay(log, "dlq", Selection()).run()

    assert "dlq:0@1 could not be sent to orders" in str(caught.value.__cause__)


def test_a_topic_that_was_deleted_meanwhile_comes_with_what_to_do() -> None:
    with DeadLetterLog("127.0.0.1:1", {"log_level": 0}) as log:
        gone = KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART)
        error = log.failure(gone, "dlq:0@1 could not be sent", topic_right(Operation.WRITE, "orders"), "pass it by")

    assert isinstance(error, TopicNotFoundError)
    assert str(error) == "dlq:0@1 could not be sent: orders was deleted meanwhile; pass it by, and try again"
