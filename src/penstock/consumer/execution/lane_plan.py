"""The plan of a consumer's lanes: how many there are, and which ready queue each is served from."""

from __future__ import annotations

from collections.abc import Collection

from penstock.consumer.assignments import ConsumerLane
from penstock.consumer.handlers.handler import Handler, Kind
from penstock.consumer.settings import ConsumerSettings

#: Lanes for each handler that may be under way on the event loop: fewer than for a thread, for there are many more.
_LANES_PER_TASK = 8
#: Lanes for each worker or task where all handlers take batches. A batch comes from one lane: the fewer, the fuller.
_LANES_PER_BATCH = 2


class LanePlan:
    """Derived from handlers and settings, and never changed."""

    def __init__(self, handlers: Collection[Handler], settings: ConsumerSettings) -> None:
        kinds = {handler.kind for handler in handlers}
        self.has_threads, self.has_tasks = Kind.THREAD in kinds, Kind.TASK in kinds
        self._pinned = settings.pinned
        thread_queues = settings.workers if settings.pinned else 1
        #: The ready queue of lanes whose head is for a task.
        self.task_queue = thread_queues if self.has_threads else 0
        #: One for all threads, one for each where lanes are pinned, and one for tasks.
        self.queues = self.task_queue + 1 if self.has_tasks else thread_queues
        self.lanes = self._lane_count(handlers, settings)

    def _lane_count(self, handlers: Collection[Handler], settings: ConsumerSettings) -> int:
        if settings.pinned:
            return settings.workers
        per_worker, per_task = settings.lanes_per_worker, _LANES_PER_TASK
        if all(handler.batch > 1 for handler in handlers):
            per_worker, per_task = min(per_worker, _LANES_PER_BATCH), _LANES_PER_BATCH
        return max(settings.workers * per_worker, settings.max_concurrency * per_task if self.has_tasks else 1)

    @property
    def has_one_queue(self) -> bool:
        """Whether all lanes are served from queue 0, so that `queue_of` need not be asked."""
        return not (self.has_threads and (self.has_tasks or self._pinned))

    def queue_of(self, lane: ConsumerLane) -> int:
        """Return the ready queue of a lane, by its head. Called by whoever has just claimed it."""
        if self.has_tasks:
            fetch = lane.due_owner() if lane.serves_due else None
            if fetch is None and lane.runs:
                fetch = lane.runs[0].owner
            if fetch is not None and fetch.assignment.route.kind is Kind.TASK:
                return self.task_queue
        return lane.number if self._pinned else 0
