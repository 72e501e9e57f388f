"""The books of an engine, checked at every step of a simulation: that its counts add up, and its bytes (I4, I5)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from penstock.consumer.assignments import OVERHEAD_BYTES, Assignment, ConsumerLane
from penstock.testing.judge import InvariantBroken
from penstock.testing.stepping import SteppedConsumer


def audit(who: str, consumer: SteppedConsumer, *, max_bytes: int, slack: int) -> None:
    """Check that every message that was taken in is done, parked, in a lane, or with a worker (I4); and the bytes (I5).

    Args:
        who: names the consumer.
        consumer: the consumer.
        max_bytes: what may be in flight at most, with one fetch.
        slack: by how many bytes messages differ.

    Raises:
        InvariantBroken: it does not add up.
    """
    least, parked, unsure = _count(consumer)
    weight = 0
    for assignment in consumer.engine.assignments.all():
        tracker = assignment.tracker
        in_flight, (count, weight_parked) = tracker.in_flight, tracker.parked
        # In flight each weighs as the mean of its fetch, parked it weighs what it weighs: that is not exact.
        weight += tracker.bytes_in_flight - weight_parked - slack * in_flight
        if count != parked[assignment]:
            raise InvariantBroken(f"I4: {who} counts {count} parked of {assignment}, but {parked[assignment]} are")
        if not least[assignment] <= in_flight <= least[assignment] + unsure[assignment]:
            raise InvariantBroken(
                f"I4: {who} counts {in_flight} in flight of {assignment}, but {least[assignment]} to "
                f"{least[assignment] + unsure[assignment]} are"
            )
        if tracker.watermark > tracker.position or tracker.watermark < assignment.committed.offset:
            raise InvariantBroken(f"I3: {who} has the watermark of {assignment} at {tracker.watermark}")
    if weight > max_bytes:
        raise InvariantBroken(f"I5: {who} has {weight} bytes in flight, and {max_bytes} are allowed with a fetch")


def _count(consumer: SteppedConsumer) -> tuple[Counter[Assignment], Counter[Assignment], Counter[Assignment]]:
    """Return what is surely in flight of each assignment, what of it is parked, and what may be in flight beside it."""
    least: Counter[Assignment] = Counter()
    parked: Counter[Assignment] = Counter()
    unsure: Counter[Assignment] = Counter()
    held = {worker.lane: worker for worker in consumer.workers if worker.lane is not None}
    for lane in consumer.engine.scheduler.lanes:
        if not (lane.runs or lane.parked or lane in held):
            continue
        _count_parked(lane, least, parked)
        worker = held.get(lane)
        if worker is None:
            for run in lane.runs:
                least[run.owner.assignment] += len(run.records) - run.next
            continue
        # Somewhere in its runs: what is done there is told when the worker leaves the run.
        for run in lane.runs:
            unsure[run.owner.assignment] += len(run.records) - run.next
        if worker.work is not None and worker.assignment is not None:
            unsure[worker.assignment] += len(worker.work) if isinstance(worker.work, list) else 1
    return least, parked, unsure


def _count_parked(lane: ConsumerLane, least: Counter[Assignment], parked: Counter[Assignment]) -> None:
    for key in lane.parked.values():
        for fetch, index, _ in key.waiting:
            # A head whose message is done stays until its lane is looked at.
            if not fetch.block.done[index]:
                parked[fetch.assignment] += 1
                least[fetch.assignment] += 1


def fetch_bytes(values: Iterable[int], fetch_size: int) -> int:
    """Return what one fetch weighs at most, of messages with values of at most so many bytes."""
    return fetch_size * (max(values, default=0) + OVERHEAD_BYTES)


__all__ = ["audit", "fetch_bytes"]
