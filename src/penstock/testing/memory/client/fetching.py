"""The fetch queue of a consumer client: messages that were fetched and not returned yet.

The position passes markers and aborted ranges only when the client reaches them. As in librdkafka they are entries of
the queue, and a call that has enough messages before leaves them there.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from confluent_kafka import KafkaError, Message

from penstock.testing.memory import codes
from penstock.testing.memory.faults import Operation
from penstock.testing.memory.log import PartitionLog, Place
from penstock.testing.memory.state import BrokerState


@dataclass(slots=True, eq=False)
class FetchedPartition:
    """An assigned partition in one client."""

    place: Place
    #: The next offset to return, or a logical offset until it is known.
    next: int
    paused: bool
    #: The next offset from the application's view: unknown before the first message.
    position: int = codes.INVALID
    #: Whether fetching ended, because there is no offset to go on from.
    stopped: bool = False
    #: Whether the queue holds a chunk of it. Chunks of another version are dropped.
    buffered: bool = False
    version: int = 0


@dataclass(slots=True, eq=False)
class _Chunk:
    """The result of one fetch: messages, and the position after them, None for an error."""

    part: FetchedPartition
    messages: Sequence[Message]
    end: int | None
    version: int
    index: int = 0


class Fetcher:
    """The fetch queue of one client. The broker's lock guards it."""

    def __init__(self, config: Mapping[str, Any], state: BrokerState) -> None:
        self._state = state
        self._group = str(config["group.id"])
        self._reset = str(config.get("auto.offset.reset", "latest"))
        self.committed_only = config.get("isolation.level", "read_committed") == "read_committed"
        self.assigned: dict[Place, FetchedPartition] = {}
        self._queue: deque[_Chunk] = deque()
        # A pause outlives the assignment: only `resume` ends it, as in librdkafka.
        self._paused: set[Place] = set()

    def assign(self, place: Place, start: int) -> None:
        """Add a partition."""
        self.assigned[place] = FetchedPartition(place, start, place in self._paused)

    def unassign(self, place: Place) -> None:
        """Remove a partition and drop its fetched messages. Its pause is kept."""
        self.assigned.pop(place).version += 1

    def pause(self, place: Place) -> None:
        """Return nothing of a partition, and drop its fetched messages."""
        self._paused.add(place)
        part = self.assigned.get(place)
        if part is not None:
            part.paused = True
            part.version += 1
            # If its error is still in the queue, it is dropped here, and the next fetch must raise it again.
            part.stopped = part.stopped and not part.buffered
            part.buffered = False

    def resume(self, place: Place) -> None:
        """Fetch a partition again, from its position."""
        self._paused.discard(place)
        part = self.assigned.get(place)
        if part is not None:
            part.paused = False

    def refill(self) -> None:
        """Fetch every partition that has nothing in the queue."""
        for part in self.assigned.values():
            if not (part.buffered or part.paused or part.stopped):
                self._fetch(part)

    def _fetch(self, part: FetchedPartition) -> None:
        log = self._state.logs.get(part.place)
        if log is None:
            return
        if part.next < 0:
            self._begin(part, log)
        if not part.stopped and not log.start <= part.next <= log.end:
            reason = "fetch failed due to requested offset not available on the broker: Broker: Offset out of range"
            self._reset_position(part, log, reason)
        if part.stopped or part.next >= log.end:
            return
        fault = self._state.faults.take(Operation.FETCH)
        if fault is not None:
            self._put_error(part, fault.error, None)
            return
        limit = int(self._state.chance.random() * self._state.max_fetch) + 1
        messages, end = log.read(part.next, limit, committed_only=self.committed_only)
        if end > part.next:
            part.buffered = True
            self._queue.append(_Chunk(part, messages, end, part.version))

    def _begin(self, part: FetchedPartition, log: PartitionLog) -> None:
        if part.next == codes.BEGINNING:
            part.next = log.start
        elif part.next == codes.END:
            part.next = self.end_of(log)
        else:
            stored = self._state.coordinator.offsets.get(self._group, {}).get(part.place)
            if stored is None:
                self._reset_position(part, log, "no previously committed offset available: Local: No offset stored")
            else:
                part.next = stored.offset

    def _reset_position(self, part: FetchedPartition, log: PartitionLog, reason: str) -> None:
        if self._reset in ("earliest", "smallest", "beginning"):
            part.next = log.start
        elif self._reset in ("latest", "largest", "end"):
            part.next = self.end_of(log)
        else:
            part.stopped = True
            offset = part.next if part.next >= 0 else None
            self._put_error(part, KafkaError(codes.AUTO_OFFSET_RESET, reason), offset)

    def end_of(self, log: PartitionLog) -> int:
        """Return the end of a log for this client's isolation level."""
        return log.last_stable if self.committed_only else log.end

    def _put_error(self, part: FetchedPartition, error: KafkaError, offset: int | None) -> None:
        topic, partition = part.place
        part.buffered = True
        self._queue.append(_Chunk(part, [error_message(error, topic, partition, offset)], None, part.version))

    def take(self, wanted: int) -> list[Message]:
        """Return up to `wanted` fetched messages."""
        taken: list[Message] = []
        queue = self._queue
        while queue and wanted:
            chunk = queue[0]
            part = chunk.part
            if chunk.version != part.version:
                queue.popleft()
                continue
            begin = chunk.index
            messages = chunk.messages[begin : begin + wanted]
            chunk.index = begin + len(messages)
            wanted -= len(messages)
            taken.extend(messages)
            ended = chunk.index == len(chunk.messages)
            if chunk.end is not None:
                if messages:
                    part.next = part.position = (messages[-1].offset() or 0) + 1
                if ended and part.next != chunk.end:
                    # Markers follow. They are the next entry of the queue, and this call may be full already.
                    if not wanted:
                        break
                    part.next = part.position = chunk.end
            if ended:
                part.buffered = False
                queue.popleft()
        return taken


def error_message(
    error: KafkaError, topic: str | None = None, partition: int = 0, offset: int | None = None
) -> Message:
    """Return an error as the client returns it: as a message with the text as its value."""
    text = error.str().encode()
    if topic is None:
        return Message(error=error, value=text, partition=partition)
    if offset is None:
        return Message(topic=topic, partition=partition, value=text, error=error)
    return Message(topic=topic, partition=partition, offset=offset, value=text, error=error)
