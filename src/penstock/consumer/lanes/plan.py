"""The lane plan: groups of lanes, one for each kind of work, and the ready queue of every lane.

A lane serves threads or the event loop, never both, so it is in one queue for life. Handlers with keys of their own
share the lanes of their kind. A batch comes from one lane, so each batch handler has a few lanes of its own: other
handlers do not change how full its batches are. Handlers with the same `key_space` share lanes, because the messages of
a key must meet in one lane.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence

from penstock.consumer.assignments import ConsumerLane
from penstock.consumer.handlers.handler import Handler, Kind
from penstock.consumer.handlers.ordering import Order
from penstock.consumer.settings import ConsumerSettings
from penstock.errors import ConfigurationError

#: Lanes for each concurrent handler on the event loop: fewer than for a thread, because there are many more of them.
_LANES_PER_TASK = 8


class LanePlan:
    """Derived from handlers and settings; never changes. `most` limits each group of lanes.

    Raises `ConfigurationError` if a plain function and an `async def` share a key space.
    """

    def __init__(self, handlers: Collection[Handler], settings: ConsumerSettings, most: int | None = None) -> None:
        _require_one_kind(handlers)
        kinds = {handler.kind for handler in handlers}
        self.has_threads, self.has_tasks = Kind.THREAD in kinds, Kind.TASK in kinds
        queues = settings.workers if settings.pinned and self.has_threads else 1
        #: The ready queue of lanes for the event loop.
        self.task_queue = queues if self.has_threads else 0
        #: The ready queue of each lane: one for all threads (or one per thread if lanes are pinned), and one for tasks.
        self.queues: list[int] = []
        self._batches: dict[Hashable, int] = {}
        for handler in handlers:
            if handler.batch > 1:
                smallest = self._batches.get(handler.space, handler.batch)
                self._batches[handler.space] = min(smallest, handler.batch)
        # The first lane and the number of lanes of each group.
        self._groups: dict[Hashable, tuple[int, int]] = {}
        for handler in handlers:
            if (group := self._name_of(handler)) not in self._groups:
                count = self._count(handler, settings)
                count = count if most is None else min(count, most)
                self._groups[group] = len(self.queues), count
                pinned = range(count) if settings.pinned else [0] * count
                self.queues += pinned if handler.kind is Kind.THREAD else [self.task_queue] * count

    def group_of(self, handler: Handler) -> tuple[int, int]:
        """Return the first lane and the number of lanes of a handler."""
        return self._groups[self._name_of(handler)]

    def lanes_of(self, lanes: Sequence[ConsumerLane], handler: Handler) -> Sequence[ConsumerLane]:
        """Return the lanes of a handler."""
        first, count = self.group_of(handler)
        return lanes[first : first + count]

    def _name_of(self, handler: Handler) -> Hashable:
        space = handler.space
        return handler.kind, space if space in self._batches else None

    def _count(self, handler: Handler, settings: ConsumerSettings) -> int:
        batch, workers, tasks = self._batches.get(handler.space), settings.workers, settings.max_concurrency
        if settings.pinned:
            return workers
        if batch is None:
            lanes = workers * settings.lanes_per_worker
            return lanes if handler.kind is Kind.THREAD else max(lanes, tasks * _LANES_PER_TASK)
        # Fewer lanes give fuller batches. On the loop, as many messages may be handled at once as without batches, in
        # at least as many calls as threads would make.
        return workers if handler.kind is Kind.THREAD else max(workers, tasks // batch)


def _require_one_kind(handlers: Collection[Handler]) -> None:
    first: dict[str, Handler] = {}
    for handler in handlers:
        if handler.key_space is None or handler.order is not Order.KEY:
            continue
        other = first.setdefault(handler.key_space, handler)
        if other.kind is not handler.kind:
            plain, awaited = (other, handler) if handler.kind is Kind.TASK else (handler, other)
            raise ConfigurationError(
                f"the handlers {plain.name} and {awaited.name} share key_space={handler.key_space!r}, but one is a "
                "plain function and the other an `async def`, and the messages of a key wait for each other in one "
                "place only; make both plain functions, or both an `async def` that calls what blocks by "
                "asyncio.to_thread"
            )
