"""Reading of committed records to the end that a log has now, waiting for open transactions to end.

The end is asked for first, as a reader of all records: readers of committed ones get the last stable offset, which
can be less. Markers of transactions give no message, so only the end of a partition tells how far reading came.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from confluent_kafka import Consumer, KafkaError, Message, TopicPartition

from penstock import clients
from penstock.clients.gc_pause import collection_put_off
from penstock.options import ClientConfig

_POLL_S = 0.1
_MESSAGES = 1_000


class EndReader:
    """Reads logs with short-lived consumers of its own, which are nobody's member. Thread-safe: calls share nothing.

    The group is the one that it asks about, and whose rights it needs.
    """

    def __init__(self, bootstrap_servers: str, config: ClientConfig, group: str) -> None:
        self._bootstrap_servers = bootstrap_servers
        self._settings: dict[str, Any] = {
            **config,
            "group.id": group,
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",
            "enable.partition.eof": True,
            # The end of a partition comes in the answer to a fetch: a broker with nothing to say shall say it soon.
            "fetch.wait.max.ms": 10,
        }
        self._settings.pop("group.instance.id", None)

    def consumer(self, isolation: str) -> Consumer:
        """Return a consumer; whoever asks for it closes it."""
        return clients.consumer(self._bootstrap_servers, {**self._settings, "isolation.level": isolation})

    def bounds(self, topic: str, partitions: Iterable[int], timeout_s: float) -> dict[int, tuple[int, int]]:
        """Return where partitions begin and end, records of open transactions included.

        Raises `KafkaException` where a broker does not answer within `timeout_s` seconds.
        """
        consumer = self.consumer("read_uncommitted")
        try:
            return {p: consumer.get_watermark_offsets(TopicPartition(topic, p), timeout_s) for p in partitions}
        finally:
            consumer.close()

    def read(
        self,
        topic: str,
        starts: Mapping[int, int],
        ends: Mapping[int, int],
        *,
        failed: Callable[[KafkaError], object],
        step: Callable[[set[int], float], object] = lambda _behind, _idle_s: None,
        limit_s: float = float("inf"),
        isolation: str = "read_committed",
    ) -> Iterator[Message]:
        """Yield the committed records of partitions, each from its start to its end; or all, if that is the isolation.

        `step` is called between fetches with the partitions that are not read to their ends, and the seconds since the
        last record; it may raise. `failed` is called with an error of the client; where it does not raise, reading goes
        on. Where the ends are not reached within `limit_s` seconds, `TimeoutError` is raised.
        """
        behind = {number for number, start in starts.items() if start < ends[number]}
        if not behind:
            return
        position, came_at = dict(starts), time.monotonic()
        deadline = came_at + limit_s
        consumer = self.consumer(isolation)
        try:
            consumer.assign([TopicPartition(topic, number, starts[number]) for number in behind])
            while behind:
                now = time.monotonic()
                if now > deadline:
                    read = ", ".join(f"[{number}] to {position[number]} of {ends[number]}" for number in sorted(behind))
                    raise TimeoutError(f"{topic} was read only {read} within {limit_s:g} s")
                step(behind, now - came_at)
                for message in take(consumer, _POLL_S, _MESSAGES):
                    number, offset, error = message.partition() or 0, message.offset() or 0, message.error()
                    if error is None:
                        came_at = now
                        yield message
                        offset += 1
                    elif error.code() != KafkaError._PARTITION_EOF:  # noqa: SLF001 - the library's public constants look so
                        failed(error)
                        continue
                    position[number] = offset
                    if offset >= ends[number]:
                        behind.discard(number)
        finally:
            consumer.close()


def take(consumer: Consumer, timeout_s: float, most: int) -> list[Message]:
    """Return records that are there, waiting for the first: asked for many, the library would wait for them all."""
    first = consumer.poll(timeout_s)
    if first is None:
        return []
    with collection_put_off():
        return [first, *(consumer.consume(most - 1, 0) if most > 1 else ())]
