"""Checks at every step of a simulation that the counts and bytes of an engine add up (I4, I5)."""

from __future__ import annotations

from itertools import chain

from penstock.consumer.assignments import OVERHEAD_BYTES, Assignment, ConsumerLane
from penstock.consumer.outbox.outbox import RefusedResults
from simulation.invariant_checker import InvariantBroken
from support.stepped_workers import SteppedWorker, WorkedConsumer


class Count:
    """The messages in flight of one assignment, counted directly: certain ones, possible ones, and parked ones."""

    __slots__ = ("least", "parked", "unsure")

    def __init__(self) -> None:
        self.least = self.unsure = self.parked = 0


def check_counts(who: str, consumer: WorkedConsumer) -> None:
    """Check that every message that was taken in is done, parked, in a lane, or with a worker (I4).

    Args:
        who: names the consumer.
        consumer: the consumer.

    Raises:
        InvariantBroken: it does not add up.
    """
    # First: a tracker applies queued changes when it is read.
    counted = [(one, one.tracker.in_flight, one.tracker.parked[0]) for one in consumer.engine.assignments.all()]
    counts = _count(consumer)
    for assignment, in_flight, parked in counted:
        count = counts.get(assignment)
        if count is None:
            if in_flight or parked:
                raise InvariantBroken(f"I4: {who} counts {in_flight} in flight of {assignment}, but none is")
            continue
        if parked != count.parked:
            raise InvariantBroken(f"I4: {who} counts {parked} parked of {assignment}, but {count.parked} are")
        if not count.least <= in_flight <= count.least + count.unsure:
            raise InvariantBroken(
                f"I4: {who} counts {in_flight} in flight of {assignment}, but {count.least} to "
                f"{count.least + count.unsure} are"
            )


def check_bytes(who: str, consumer: WorkedConsumer, *, limit_bytes: int, fetch_size: int, message_bytes: int) -> None:
    """Check that the bytes in flight are those allowed, with one fetch and a message of each partition (I5).

    Args:
        who: names the consumer.
        consumer: the consumer.
        limit_bytes: the limit.
        fetch_size: messages of a fetch.
        message_bytes: bytes of a message's key, value and headers, at most.

    Raises:
        InvariantBroken: there are more.
    """
    weight = 0
    assignments = consumer.engine.assignments.all()
    for assignment in assignments:
        tracker = assignment.tracker
        # In flight each weighs as the mean of its fetch, parked it weighs what it weighs: that is not exact.
        weight += tracker.bytes_in_flight - tracker.parked[1] - message_bytes * tracker.in_flight
        # What a former owner had done right behind the position may be committed.
        behind = max(tracker.watermark, tracker.commit_point().offset)
        if assignment.committed.offset > behind or tracker.watermark > tracker.position:
            raise InvariantBroken(f"I3: {who} has the watermark of {assignment} at {tracker.watermark}")
    # One that holds next to nothing takes a message in whatever the others hold.
    allowed = limit_bytes + (fetch_size + len(assignments)) * (message_bytes + OVERHEAD_BYTES)
    if weight > allowed:
        raise InvariantBroken(f"I5: {who} has {weight} bytes in flight, and {allowed} are allowed with a fetch")


def _count(consumer: WorkedConsumer) -> dict[Assignment, Count]:
    counts: dict[Assignment, Count] = {}
    _count_unpublished(consumer, counts)
    held = {worker.lane: worker for worker in consumer.workers if worker.lane is not None}
    for lane in consumer.engine.scheduler.lanes:
        if lane.parked:
            _count_parked(lane, counts)
        worker = held.get(lane)
        for refused in lane.due:
            if isinstance(refused, RefusedResults):
                count = counts.setdefault(refused.item[0].assignment, Count())
                count.least, count.unsure = count.least + (worker is None), count.unsure + (worker is not None)
        for run in chain(lane.runs, *(aside.runs for aside in lane.aside.values())):
            count = counts.setdefault(run.owner.assignment, Count())
            if worker is None:
                count.least += len(run.records) - run.next
            else:
                # Somewhere in its runs: done messages are reported when the worker leaves the run.
                count.unsure += len(run.records) - run.next
        if worker is not None:
            _count_under_way(worker, counts)
    return counts


def _count_unpublished(consumer: WorkedConsumer, counts: dict[Assignment, Count]) -> None:
    """Count messages that left their lane and whose results are not written. Those for other topics count as parked."""
    for submission in dict.fromkeys(consumer.engine.outbox.submissions()):
        if submission.lane is not None:
            for fetch, index, _ in submission.items:
                if not fetch.block.done[index]:
                    counts.setdefault(fetch.assignment, Count()).least += 1


def _count_parked(lane: ConsumerLane, counts: dict[Assignment, Count]) -> None:
    for key in dict.fromkeys(lane.parked.values()):
        for fetch, index, _ in key.waiting:
            # A head whose message is done stays until its lane is looked at.
            if not fetch.block.done[index]:
                count = counts.setdefault(fetch.assignment, Count())
                count.parked += 1
                count.least += 1


def _count_under_way(worker: SteppedWorker, counts: dict[Assignment, Count]) -> None:
    if worker.work is not None:
        for assignment in worker.assignments:
            count = counts.setdefault(assignment, Count())
            count.unsure += len(worker.work) if isinstance(worker.work, list) else 1


__all__ = ["check_bytes", "check_counts"]
