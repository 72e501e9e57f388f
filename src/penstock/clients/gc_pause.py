"""When Python looks for garbage: not while messages are read, and not among modules."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

#: Objects that a message brings at most: itself, and a run with two lists for it alone.
_OBJECTS = 4
#: Objects of messages that are allowed for at most.
_MOST_OBJECTS = 400_000
#: Messages that are not worth it.
_FEW = 100
#: Seconds for which the threshold stays after there were so many messages that it was raised.
_RAISED_S = 5.0


@contextmanager
def collection_put_off() -> Iterator[None]:
    """Keep Python from looking for garbage while many messages are read or sent; then it does as before.

    Messages make no cycles: looking took half of the time that Spark's source reads for (0.57 million rows/s with it,
    1.08 without). The setting is the process's, so keep the time short, and call nothing that may wait.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


class CollectionThreshold:
    """Has Python look for garbage later while many messages come at once. On one thread.

    It looks when there are 700 objects more than at the last time, through all that are new since. Messages that wait
    for their handlers are such objects, tens of thousands, and in use. Looking through them, again and again, took a
    quarter of the CPU with 1,000 handlers on the event loop, and stopped those for up to a quarter of a second. So
    what the messages in flight are is added to the process's own threshold, until few have been for a while: no more
    garbage is left lying than messages.
    """

    def __init__(self) -> None:
        self._usual = self._set = gc.get_threshold()[0]
        self._until = 0.0

    def note_in_flight(self, messages: int, now: float) -> None:
        """Note how many messages are in flight, at `now` by a clock that does not go back."""
        current = gc.get_threshold()[0]
        if current != self._set:
            # The process has another threshold of its own since.
            self._usual = self._set = current
        if not self._usual:  # it looks for garbage itself, or never
            return
        wanted = self._usual + (min(messages * _OBJECTS, _MOST_OBJECTS) if messages > _FEW else 0)
        if wanted >= current:
            self._until = now + _RAISED_S
        if wanted > current or now >= self._until:
            self._change(wanted)

    def restore(self) -> None:
        """Take the process's own threshold again."""
        if gc.get_threshold()[0] == self._set:
            self._change(self._usual)

    def _change(self, threshold: int) -> None:
        gc.set_threshold(threshold, *gc.get_threshold()[1:])
        self._set = threshold


@cache
def imports_set_aside(kind: str) -> None:  # noqa: ARG001 - once for each
    """Take what is in memory, modules for the most part, out of Python's search for garbage, once per kind of task.

    Between two tasks Spark's Python workers look at all objects there are: 60 ms with pyspark, pyarrow and this package
    imported, where a task of a few hundred rows takes 10. Only a cycle among what is set aside is not found any more.
    """
    gc.collect()
    gc.freeze()
