"""A fake client: it returns given records and errors of the topic `orders`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from confluent_kafka import TIMESTAMP_CREATE_TIME, KafkaError, KafkaException, Message, TopicPartition


def record(offset: int, partition: int = 0, stamp_ms: int = 1_000) -> Message:
    stamp = (TIMESTAMP_CREATE_TIME, stamp_ms)
    return Message(topic="orders", partition=partition, offset=offset, key=None, value=b"x", timestamp=stamp)


def failed(code: int, partition: int = 0, offset: int | None = None) -> Message:
    if offset is None:
        return Message(topic="orders", partition=partition, error=KafkaError(code))
    return Message(topic="orders", partition=partition, error=KafkaError(code), offset=offset)


def end(offset: int, partition: int = 0) -> Message:
    return failed(KafkaError._PARTITION_EOF, partition, offset)


class FixedConsumer:
    """A consumer that returns given records and errors, and then nothing."""

    def __init__(self, *given: Message, first_offset: Iterable[object] = ()) -> None:
        self._given = list(given)
        self._first_offset = list(first_offset)
        self.assigned: list[TopicPartition] = []
        self.paused: list[tuple[str, int]] = []
        self.is_unassigned = False

    def assign(self, parts: list[TopicPartition]) -> None:
        self.assigned += parts

    def unassign(self) -> None:
        self.is_unassigned = True

    def pause(self, parts: list[TopicPartition]) -> None:
        self.paused += [(part.topic, part.partition) for part in parts]

    def assignment(self) -> list[TopicPartition]:
        return self.assigned

    def resume(self, _parts: list[TopicPartition]) -> None:
        self.paused.clear()

    def consume(self, count: int, _timeout: float) -> list[Message]:
        taken, self._given = self._given[:count], self._given[count:]
        return taken

    def poll(self, timeout: float) -> Message | None:
        taken = self.consume(1, timeout)
        return taken[0] if taken else None

    def get_watermark_offsets(self, _part: TopicPartition, timeout: float) -> tuple[int, int] | None:
        assert timeout > 0
        answer: Any = self._first_offset.pop(0)
        if isinstance(answer, KafkaException):
            raise answer
        return None if answer is None else (answer, 100)

    def close(self) -> None:
        pass
