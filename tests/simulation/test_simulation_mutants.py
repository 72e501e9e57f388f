"""A simulation finds defects: each of these is planted in the consumer, and found within a few seeds."""

# ruff: noqa: ARG005 - what is planted takes the arguments of what it replaces

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterable, Sequence
from math import inf
from types import SimpleNamespace
from typing import Any, cast

import pytest

from penstock.consumer.assignments import Assignments
from penstock.consumer.execution.lanes.lane_processor import LaneProcessor
from penstock.consumer.execution_slot import ExecutionSlot
from penstock.consumer.failures.dead_letter_publisher import DeadLetterPublisher
from penstock.consumer.failures.parking import Parking
from penstock.consumer.failures.timers import Timers
from penstock.consumer.handlers.options.ordering import Ordering
from penstock.consumer.polling.committing import commits
from penstock.consumer.polling.committing.commits import Commits
from penstock.consumer.polling.flow_control.back_pressure import BackPressure
from penstock.consumer.polling.group.rebalance import Rebalance
from penstock.offsets import CommitPoint, OffsetMap, Tracker
from penstock.routing import Scheduler
from simulation.invariant_checker import InvariantBroken
from simulation.varied import run, silence

#: In how many seeds a defect must show.
SEEDS = 150

Plant = Callable[[pytest.MonkeyPatch], None]


def commits_what_was_fetched(patch: pytest.MonkeyPatch) -> None:
    """The commit point is the position, not the watermark."""
    patch.setattr(Tracker, "commit_point", lambda self, *_: CommitPoint(self.position, ""))


def commits_one_too_many(patch: pytest.MonkeyPatch) -> None:
    """The watermark itself is told as done while something is in flight."""
    point = Tracker.commit_point
    patch.setattr(
        Tracker,
        "commit_point",
        lambda self, *limit: CommitPoint(point(self).offset + (self.in_flight > 0), point(self, *limit).metadata),
    )


def gives_up_what_cannot_be_written(patch: pytest.MonkeyPatch) -> None:
    """A dead letter that failed completes its offset."""
    patch.setattr(DeadLetterPublisher, "_hold", lambda self, one, *rest, **options: (one.complete(), one.on_done()))


def keeps_handling_what_was_revoked(patch: pytest.MonkeyPatch) -> None:
    """A revocation stops nobody and waits for nobody."""
    find = Assignments.deactivate

    def deactivate(self: Assignments, partitions: Iterable[tuple[str, int]]) -> list[Any]:
        found = find(self, partitions)
        for one in found:
            one.active = True
        return found

    patch.setattr(Assignments, "deactivate", deactivate)


def does_not_wait_for_handlers(patch: pytest.MonkeyPatch) -> None:
    """A revocation does not wait for the handlers of its partitions."""
    patch.setattr(LaneProcessor, "busy_with", lambda self, slots, assignments: [])


def lets_later_messages_pass(patch: pytest.MonkeyPatch) -> None:
    """What comes for a parked key is not kept behind it."""
    park = Parking.park
    patch.setattr(Parking, "park", lambda self, lane, key, item: park(self, lane, ("another", key), item))


def shares_lanes(patch: pytest.MonkeyPatch) -> None:
    """A lane that has work is queued though somebody holds it."""
    take, give_back, linger = Scheduler.take, Scheduler.give_back, Scheduler.linger

    def take_and_let_go(self: Scheduler[Any, Any], queue: int, owed_s: float = 0.0) -> Any:
        lane = take(self, queue, owed_s)
        if lane is not None and lane.claim.locked():
            lane.claim.release()
        return lane

    def claimed(lane: Any) -> Any:
        lane.claim.acquire(blocking=False)
        return lane

    def queue(self: Scheduler[Any, Any], lane: Any) -> int:
        # A queue that is emptied by two has no head that the scheduler could rely on; this defect must not show there.
        queue = 0 if self._queue_of is None else self._queue_of(lane)
        heapq.heappush(self._ready[queue], lane.number)
        return queue

    patch.setattr(Scheduler, "_push", queue)
    patch.setattr(Scheduler, "take", take_and_let_go)
    patch.setattr(Scheduler, "give_back", lambda self, lane: give_back(self, claimed(lane)))
    patch.setattr(Scheduler, "linger", lambda self, lane, *more: linger(self, claimed(lane), *more))


def takes_what_is_in_the_handler_for_done(patch: pytest.MonkeyPatch) -> None:
    """A run is told to be one message further than it is."""
    finished = ExecutionSlot.finished

    def one_further(self: ExecutionSlot) -> Any:
        found = finished(self)
        return None if found is None else (found[0], range(found[1].start, found[1].stop + 1))

    patch.setattr(ExecutionSlot, "finished", one_further)


def chooses_lanes_by_chance(patch: pytest.MonkeyPatch) -> None:
    """The messages of one key go to any lane."""
    chance = random.Random(1)  # noqa: S311 - the same defect each time

    def lane_numbers(self: Ordering, topic: str, partition: int, records: Sequence[object], *_: object) -> list[int]:
        return [chance.randrange(self._lanes) for _ in records]

    patch.setattr(Ordering, "lane_numbers", lane_numbers)


def believes_more_than_was_done(patch: pytest.MonkeyPatch) -> None:
    """What a former owner had done is taken for one offset more."""
    has = OffsetMap.__contains__
    patch.setattr(OffsetMap, "__contains__", lambda self, offset: has(self, offset) or has(self, offset - 1))


def forgets_what_failed_to_be_committed(patch: pytest.MonkeyPatch) -> None:
    """A commit that failed is not made again."""

    def note(self: Commits, why: str, partitions: Iterable[Any]) -> None:
        for assignment in self._assignments.all():
            assignment.acknowledged = True

    patch.setattr(Commits, "_note_failure", note)
    # What is committed though nothing has changed would mend it by chance.
    patch.setattr(commits, "_IDLE_S", inf)


def forgets_to_resume(patch: pytest.MonkeyPatch) -> None:
    """A partition that is paused stays so."""
    patch.setattr(BackPressure, "_resume", lambda self, consumer, assignment: None)


def loses_timers(patch: pytest.MonkeyPatch) -> None:
    """Some retries are never due."""
    add, chance = Timers.add, random.Random(1)  # noqa: S311 - the same defect each time
    patch.setattr(Timers, "add", lambda self, due, call: add(self, due if chance.random() < 0.7 else inf, call))


def commits_what_was_lost(patch: pytest.MonkeyPatch) -> None:
    """Partitions that were lost are committed as if they had been revoked, and waited for by nobody."""
    patch.setattr(Tracker, "watermark", property(lambda self: self.position))
    patch.setattr(Tracker, "_watermark", lambda self: self._position)


def counts_what_is_parked_for_ever(patch: pytest.MonkeyPatch) -> None:
    """A parked message that is done still counts as parked."""
    park = Tracker.park
    patch.setattr(Tracker, "park", lambda self, count, size: park(self, count, size) if count > 0 else None)


def takes_in_without_a_limit(patch: pytest.MonkeyPatch) -> None:
    """Full or not, more is fetched."""
    patch.setattr(BackPressure, "apply", lambda self, consumer, assignments, now: True)


def waits_for_handlers_as_long_as_it_takes(patch: pytest.MonkeyPatch) -> None:
    """A revocation waits far beyond its budget."""
    revoke = Rebalance.on_revoke

    def on_revoke(self: Rebalance, consumer: Any, partitions: Any) -> None:
        self.revoke_timeout, self.stop_request = 600.0, cast("Any", SimpleNamespace(end_by=inf))
        revoke(self, consumer, partitions)

    patch.setattr(Rebalance, "on_revoke", on_revoke)


PLANTS: dict[Plant, str] = {
    commits_what_was_fetched: "I3",
    commits_one_too_many: "I3",
    gives_up_what_cannot_be_written: "I3|I2|not done",
    keeps_handling_what_was_revoked: "I|began|gave",
    does_not_wait_for_handlers: "gave",
    lets_later_messages_pass: "I2|I4",
    takes_what_is_in_the_handler_for_done: "I3|I4",
    shares_lanes: "I1|I2|I4",
    chooses_lanes_by_chance: "I1|I2",
    believes_more_than_was_done: "not done|I2|I3",
    forgets_what_failed_to_be_committed: "committed",
    forgets_to_resume: "not done",
    loses_timers: "not done",
    commits_what_was_lost: "I3",
    counts_what_is_parked_for_ever: "I4",
    takes_in_without_a_limit: "I5",
    waits_for_handlers_as_long_as_it_takes: "I6|gave",
}


def run_all() -> None:
    """Run the seeds until one fails."""
    for seed in range(SEEDS):
        run(seed)


@pytest.mark.parametrize("plant", PLANTS, ids=lambda plant: plant.__name__)
def test_a_planted_defect_is_found(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)

    with silence(), pytest.raises(InvariantBroken, match=rf"^[^\n]*({PLANTS[plant]})") as found:
        run_all()

    assert any("PENSTOCK_SIMULATION_SEED=" in note for note in found.value.__notes__)
