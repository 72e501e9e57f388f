"""Decisions on their way into the op log, many in one record.

Nagle's rule: a decision goes at once where none is under way; those that come meanwhile gather, in their order, and go
together when the answer is there. So one caller waits for nothing, and of thousands each pays a small part of a
record. Lanes, one for each producer group and half partition, keep decisions in the order in which they were made.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from dataclasses import dataclass, field
from functools import partial

from confluent_kafka import KafkaError, KafkaException, Message

from penstock.errors import DecisionNotStoredError, StoppedError
from penstock.transactions.store import DecidedCallback
from penstock.transactions.stores.kafka.publication_pace import PublicationPace
from penstock.transactions.wire.ops import Op, encode_ops
from penstock.transactions.writing.acked_producer import AckedProducer

_log = logging.getLogger("penstock.transactions")

#: Most decisions in one record: some 100 kB.
_MOST = 2_000
#: Records of one lane that may be under way.
_UNDER_WAY = 2

Waiting = tuple[Op, DecidedCallback]


@dataclass(slots=True, eq=False)
class _Lane:
    """Decisions of one group for one half partition. All fields are guarded by the lock."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    waiting: deque[Waiting] = field(default_factory=deque)
    under_way: int = 0
    #: Whether it is to be looked at after the reports under way. The delivery thread's alone, and under no lock.
    is_gathering: bool = False


class OpBatches:
    """Writes decisions into the op topic. Thread-safe. `pace` says when answers are given."""

    def __init__(self, sends: AckedProducer, topic: str, pace: PublicationPace) -> None:
        self._sends = sends
        self._topic = topic
        self._pace = pace
        # Only grows; setdefault is one step under the interpreter lock.
        self._lanes: dict[tuple[str, int], _Lane] = {}
        # Lanes to look at after the reports under way. Any thread adds, the delivery thread takes.
        self._dirty: deque[_Lane] = deque()

    def add(self, op: Op, callback: DecidedCallback) -> None:
        """Have a decision written; call back once it is durable, or that is not known."""
        place = (op.group, op.half_partition)
        lane = self._lanes.get(place)
        if lane is None:
            lane = self._lanes.setdefault(place, _Lane())
        if self._sends.in_delivery_thread:
            # Reports come in crowds: what they lead to goes together. To append is one step under the interpreter lock;
            # whoever sends what waits takes it from the other end, under the lane's lock.
            lane.waiting.append((op, callback))
            if not lane.is_gathering:
                lane.is_gathering = True
                self._dirty.append(lane)
            return
        with lane.lock:
            lane.waiting.append((op, callback))
            if lane.under_way:
                return
            refused = self._flush(lane)
        self._refuse(*refused)

    @property
    def open(self) -> int:
        """Lanes with decisions that are not answered for."""
        return sum(1 for lane in list(self._lanes.values()) if lane.waiting or lane.under_way)

    def after_reports(self) -> None:
        """Send what gathered while reports came in. Called by the delivery thread."""
        for _ in range(len(self._dirty)):
            lane = self._dirty.popleft()
            lane.is_gathering = False
            with lane.lock:
                refused = self._flush(lane)
            self._refuse(*refused)
        self._pace.look()

    def _flush(self, lane: _Lane) -> tuple[list[Waiting], str]:
        """Send what waits, as far as may be under way; return what the client library refused, and why."""
        while lane.waiting and lane.under_way < _UNDER_WAY:
            batch = [lane.waiting.popleft() for _ in range(min(_MOST, len(lane.waiting)))]
            ops = [op for op, _ in batch]
            try:
                taken = self._sends.try_post(
                    self._topic, ops[0].half_partition, encode_ops(ops), partial(self._report, lane, batch)
                )
            except StoppedError as error:
                # One by one: the delivery thread may add meanwhile.
                while lane.waiting:
                    batch.append(lane.waiting.popleft())
                return batch, str(error)
            except KafkaException as error:
                # Those behind it are tried with the next reports.
                self._dirty.append(lane)
                return batch, self._sends.why(self._topic, error.args[0])
            if not taken:
                lane.waiting.extendleft(reversed(batch))
                # The delivery thread tries again after its next reports, or after a tenth of a second.
                self._dirty.append(lane)
                break
            lane.under_way += 1
        return [], ""

    def _report(self, lane: _Lane, batch: list[Waiting], error: KafkaError | None, message: Message) -> None:
        with lane.lock:
            lane.under_way -= 1
        self._dirty.append(lane)
        if error is not None:
            self._refuse(batch, self._sends.why(self._topic, error))
            return
        place = message.partition() or 0, message.offset() or 0
        self._pace.stored(*place, len(batch), partial(self._complete, batch))

    @staticmethod
    def _complete(batch: list[Waiting]) -> None:
        for _, callback in batch:
            try:
                callback(None)
            except Exception:  # noqa: BLE001 - the others of the record must be completed
                _log.exception("a callback of a decision raised")

    def _refuse(self, batch: list[Waiting], cause: str) -> None:
        for op, callback in batch:
            callback(
                DecisionNotStoredError(
                    f"transaction {op.transaction_id}: its {op.verdict.name} is not known to be stored in "
                    f"{self._topic}[{op.half_partition}]: {cause}"
                )
            )
