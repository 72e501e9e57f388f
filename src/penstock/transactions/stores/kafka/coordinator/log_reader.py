"""The half and op logs of the partitions that a coordinator owns, read side by side.

Each kind has a consumer of its own, for neither may run far ahead of the other. Halves far ahead of the decisions on
them would fill the memory while nothing of them can be published; decisions ahead of their halves likewise. One
consumer of both hands out whatever was fetched first, which under load was the halves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import chain

from confluent_kafka import Consumer, Message, TopicPartition

from penstock.clients.reading import take
from penstock.transactions.wire.ops import DECISION_BYTES
from penstock.transactions.wire.topics import StoreTopics

#: How large op records are taken for before one was seen: the first comes alone.
_FIRST_OP_BYTES = 1 << 20


class LogReader:
    """Reads both logs. Used by the coordinator's thread.

    The consumers that `make` returns must not choose a new offset by themselves (`auto.offset.reset=error`): a log that
    is not as it was would be read past in silence.
    """

    def __init__(self, make: Callable[[], Consumer], topics: StoreTopics) -> None:
        self._half, self._op = topics.half, topics.op
        self._halves = make()
        self._ops = make()
        # Mean size of op records, as it was last seen: nearly all are one decision, or many of a fixed size.
        self._op_bytes = _FIRST_OP_BYTES
        # Offset of the next op, by partition.
        self._next_op: dict[int, int] = {}

    def add(self, number: int, half_position: int, op_position: int) -> None:
        """Read the logs of a partition, too, from these offsets."""
        self._halves.incremental_assign([TopicPartition(self._half, number, half_position)])
        self._ops.incremental_assign([TopicPartition(self._op, number, op_position)])
        self._next_op[number] = op_position

    def remove(self, number: int) -> None:
        """Read the logs of a partition no more."""
        self.resume_ops(number)
        self._halves.incremental_unassign([TopicPartition(self._half, number)])
        self._ops.incremental_unassign([TopicPartition(self._op, number)])
        del self._next_op[number]

    def pause_ops(self, number: int) -> None:
        """Read no more ops of a partition until `resume_ops`: what was read of them waits for halves."""
        self._ops.pause([TopicPartition(self._op, number)])

    def resume_ops(self, number: int) -> None:
        """Read the ops of a partition again."""
        self._ops.resume([TopicPartition(self._op, number)])

    def close(self) -> None:
        """Close the consumers."""
        self._halves.close()
        self._ops.close()

    def read(self, timeout_s: float, most: int, *, for_halves: bool, full: bool) -> Iterable[Message]:
        """Return records that are there, halves first: about as many halves as decisions, `most` of each.

        What is waited for is a decision, for a half without one is nothing to do; `for_halves`: or a half, for there
        are decisions that were fetched before theirs. `full`: no halves are wanted as long as there are decisions.
        """
        halves = take(self._halves, timeout_s, most) if for_halves else []
        ops = self._read_ops(0 if for_halves else timeout_s, most)
        if not for_halves and not (full and (ops or self._has_more_ops())):
            halves = take(self._halves, 0, most)
        return chain(halves, ops)

    def _read_ops(self, timeout_s: float, decisions: int) -> list[Message]:
        ops = take(self._ops, timeout_s, max(1, decisions * DECISION_BYTES // self._op_bytes))
        if ops:
            self._op_bytes = max(DECISION_BYTES, sum(map(len, ops)) // len(ops))
            for op in ops:
                if op.error() is None:
                    self._next_op[op.partition() or 0] = (op.offset() or 0) + 1
        return ops

    def _has_more_ops(self) -> bool:
        """Tell whether an op log goes on behind what was read, even if it has not come yet."""
        return any(self._known_end(self._ops, self._op, number) > at for number, at in self._next_op.items())

    @staticmethod
    def _known_end(reader: Consumer, topic: str, number: int) -> int:
        return reader.get_watermark_offsets(TopicPartition(topic, number), cached=True)[1]
