"""The time of a transaction, hop by hop, for `transactions.py --trace`.

Each process records when a message passes its hops, with the send time at the beginning of its value; one machine has
one clock. Only one message in several is recorded. penstock does not know of it: this file wraps the functions that a
message passes.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable
from typing import Any

from penstock.clients.transactional.writer import TransactionalWriter
from penstock.transactions.core.pending import Pending
from penstock.transactions.core.state import PartitionState
from penstock.transactions.producer.flight import Flight
from penstock.transactions.publishing.publisher import Publisher
from penstock.transactions.stores.kafka.coordinator.half_partition import HalfPartition

#: Bytes of send time at the start of each value, in nanoseconds.
STAMP = 8
#: One message in so many is recorded. A prime: with 8, all or none of those sent every 10 ms were recorded.
_EVERY = 7

#: The hops of a message, each with its last event.
HOPS = {
    "half stored": "from the send, with any wait for room, until the half is acknowledged",
    "decision stored": "until the decision is acknowledged",
    "half read": "until the coordinator has read the half (before the decision is acknowledged: 0)",
    "decision read": "until it has read the decision",
    "group begun": "until its Kafka transaction begins",
    "group committed": "until that is committed, as the coordinator sees it",
    "visible": "until a committed reader has it",
}
_SENDER = ("half stored", "decision stored")
_COORDINATOR = ("half read", "decision read", "group begun", "group committed")
#: The steps of a Kafka transaction of the coordinator, by the name of the blocking call.
STEPS = ("begin_transaction", "send_offsets_to_transaction", "delivery", "commit_transaction")

Notes = dict[str, dict[int, int]]


class Trace:
    """The records of one process: the time in ns at which a message passed a hop, and the durations of steps."""

    def __init__(self) -> None:
        self.notes: Notes = {hop: {} for hop in HOPS}
        self.steps: dict[str, list[float]] = {step: [] for step in STEPS}
        self.groups: list[int] = []

    def note(self, hop: str, value: bytes | None, now: int) -> None:
        """Record that a message passed a hop."""
        stamp = int.from_bytes((value or b"")[:STAMP], "big")
        if stamp // 1_000 % _EVERY == 0:
            self.notes[hop][stamp] = now

    def take(self) -> dict[str, Any]:
        """Return the records for JSON, and forget them."""
        notes = {hop: list(times.items()) for hop, times in self.notes.items() if times}
        taken = {"notes": notes, "steps": self.steps, "groups": self.groups}
        self.notes = {hop: {} for hop in HOPS}
        self.steps, self.groups = {step: [] for step in STEPS}, []
        return taken

    def of_sender(self) -> None:
        """Record the hops of flights in this process."""
        for name, hop in zip(("_halves_answered", "_decision_answered"), _SENDER, strict=True):
            self._wrap(Flight, name, lambda flight, *_, hop=hop: self.note(hop, flight.halves[0].value, time.time_ns()))

    def of_coordinator(self) -> None:
        """Record what the coordinator of this process reads, decides and commits."""
        read, decided, begun, committed = _COORDINATOR
        self._wrap(PartitionState, "add_half", lambda _, __, half, *___: self.note(read, half.value, time.time_ns()))
        self._wrap(PartitionState, "_decide", lambda _, tx, *__: self.note(decided, tx.half.value, time.time_ns()))
        self._wrap(HalfPartition, "began", lambda _, batch: self._group(begun, batch.decided))
        self._wrap(HalfPartition, "settled", lambda _, batch, __: self._group(committed, batch.decided))
        self._wrap(TransactionalWriter, "step", self._step)
        # The last call of a transaction ends here, not where the next one begins.
        self._wrap(Publisher, "_commit", lambda _: None, lambda publisher: publisher.writer.step(""))

    def _group(self, hop: str, some: Iterable[Pending]) -> None:
        now, settled = time.time_ns(), list(some)
        for pending in settled:
            self.note(hop, pending.half.value, now)
        if hop == "group begun":
            self.groups.append(len(settled))

    def _step(self, writer: TransactionalWriter, _: str) -> None:
        """Record the duration of a writer's call."""
        if writer.doing in self.steps:
            self.steps[writer.doing].append(time.monotonic() - writer.doing_since)

    @staticmethod
    def _wrap(kind: type, name: str, before: Callable[..., object], after: Callable[..., object] | None = None) -> None:
        function = getattr(kind, name)

        @functools.wraps(function)
        def wrapped(*args: Any, **options: Any) -> Any:
            before(*args, **options)
            result = function(*args, **options)
            if after is not None:
                after(*args)
            return result

        setattr(kind, name, wrapped)


def report(taken: Iterable[dict[str, Any]]) -> None:
    """Print p50 and p99 of each hop, its part of the total time, and the steps of a group."""
    times: dict[int, dict[str, int]] = {}
    steps: dict[str, list[float]] = {}
    groups: list[int] = []
    for record in taken:
        for hop, noted in record["notes"].items():
            for stamp, at in noted:
                times.setdefault(stamp, {})[hop] = at
        for step, took in record["steps"].items():
            steps.setdefault(step, []).extend(took)
        groups += record["groups"]
    whole = {stamp: passed for stamp, passed in times.items() if len(passed) == len(HOPS)}
    waits: dict[str, list[float]] = {hop: [] for hop in (*HOPS, "all")}
    for stamp, passed in whole.items():
        before = stamp
        for hop in HOPS:
            waits[hop].append(max(0, passed[hop] - before) / 1e6)
            before = max(before, passed[hop])
        waits["all"].append((before - stamp) / 1e6)
    total = sum(waits["all"]) or 1.0
    print(f"{'hop':>20} {'p50 ms':>8} {'p99 ms':>8} {'mean':>8} {'part':>6}   of {len(whole):,} messages")
    for hop, found in waits.items():
        mean = sum(found) / max(1, len(found))
        part = f"{sum(found) / total:.0%}"
        times_ms = f"{quantile(found, 50):>8.1f} {quantile(found, 99):>8.1f} {mean:>8.1f}"
        print(f"{hop:>20} {times_ms} {part:>6}   {HOPS.get(hop, '')}")
    sizes = f"size p50 {quantile(groups, 50):.0f}, p99 {quantile(groups, 99):.0f}"
    print(f"groups of the coordinator: {len(groups):,}, {sizes}; their steps, p50 and p99 in ms:")
    for step, found in steps.items():
        found_ms = [1_000 * record for record in found]
        print(f"{step:>28} {quantile(found_ms, 50):>8.1f} {quantile(found_ms, 99):>8.1f}")


def quantile(some: Iterable[float], percent: int) -> float:
    """Return a percentile; 0 without values."""
    ordered = sorted(some)
    return ordered[len(ordered) * percent // 100] if ordered else 0.0
