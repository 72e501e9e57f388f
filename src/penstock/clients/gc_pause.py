"""Delays Python's garbage collection while many messages are read, and keeps modules out of it."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

#: Most objects for one message: itself, and a run with two lists that hold nothing else.
_OBJECTS = 4
#: Most objects by which the threshold is raised.
_MOST_OBJECTS = 400_000
#: With fewer messages in flight the threshold stays as it is.
_FEW = 100
#: Seconds for which the threshold stays raised after the last burst of messages.
_RAISED_S = 5.0


@contextmanager
def collection_put_off() -> Iterator[None]:
    """Switch garbage collection off while many messages are read or sent, then restore it.

    Messages make no reference cycles. Collection took half of the time of Spark's source (0.57 million rows/s with it,
    1.08 without). The setting counts for the whole process: keep the block short, and call nothing in it that may wait.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class _ProcessThreshold:
    """The process's threshold of garbage collection: its own plus what each owner adds. Thread-safe."""

    def __init__(self) -> None:
        # Guards all below: the process's own threshold, the one that was set last, and the objects by owner.
        self._lock = threading.Lock()
        self._own = self._set = 0
        self._added: weakref.WeakKeyDictionary[object, int] = weakref.WeakKeyDictionary()

    def is_foreign(self) -> bool:
        """Tell whether the program has changed the threshold."""
        return gc.get_threshold()[0] != self._set

    def add(self, owner: object, objects: int) -> None:
        """Add so many objects for an owner from now on, until it ends."""
        with self._lock:
            if self.is_foreign():
                self._own = self._set = gc.get_threshold()[0]
            self._added[owner] = objects
            if self._own:  # otherwise the program collects by itself, or never
                self._set = self._own + sum(self._added.values())
                gc.set_threshold(self._set, *gc.get_threshold()[1:])


_process = _ProcessThreshold()


class CollectionThreshold:
    """Raises the threshold of garbage collection while many messages are in flight. Used by one thread.

    Python collects after 700 new objects and walks all young ones. Messages that wait for their handlers are tens of
    thousands of such objects, all in use. Walking them again and again took a quarter of the CPU with 1,000 handlers on
    the event loop, and stopped the handlers for up to 0.25 s. So the threshold is the process's own plus the objects of
    the messages in flight, until few have been in flight for a while. No more garbage can pile up than there are
    messages. What several consumers and coordinators of a process add is summed up.
    """

    def __init__(self) -> None:
        self._added = 0
        self._until = 0.0

    def note_in_flight(self, messages: int, now: float) -> None:
        """Adapt the threshold to the messages in flight, at the monotonic time `now`."""
        objects = min(messages * _OBJECTS, _MOST_OBJECTS) if messages > _FEW else 0
        if objects >= self._added:
            self._until = now + _RAISED_S
        if objects > self._added or (objects < self._added and now >= self._until) or _process.is_foreign():
            self._add(objects)

    def restore(self) -> None:
        """Add nothing from now on."""
        self._add(0)

    def _add(self, objects: int) -> None:
        self._added = objects
        _process.add(self, objects)


@cache
def imports_set_aside(kind: str) -> None:  # noqa: ARG001 - once for each
    """Exclude the objects in memory, mostly modules, from garbage collection, once per kind of task.

    Between two tasks, Spark's Python workers collect all objects: 60 ms with pyspark, pyarrow and this package
    imported, while a task of a few hundred rows takes 10 ms. Garbage cycles among the excluded objects are never freed.
    """
    gc.collect()
    gc.freeze()
