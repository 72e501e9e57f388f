"""The questions of a file store to the producer groups of its process: who is there to answer, and what waits for him.

A producer that can answer has a source here. Each check of a transaction goes to another one, where there are several.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

from penstock.transactions.wire.check_request import CheckRequest

#: Questions that may wait for one producer; what is more is asked later.
_WAITING = 1_000
_TAKEN = 500


class Source:
    """The questions to one producer. `take` and `close` are used by one thread."""

    def __init__(self, closed: Callable[[Source], None]) -> None:
        self._questions: queue.Queue[CheckRequest] = queue.Queue(_WAITING)
        self._closed = closed

    def offer(self, request: CheckRequest) -> bool:
        """Ask, and tell whether there was room for the question."""
        try:
            self._questions.put_nowait(request)
        except queue.Full:
            return False
        return True

    def take(self, timeout_s: float) -> Sequence[CheckRequest]:
        """Return the questions that are there, waiting at most `timeout_s` seconds for the first."""
        found: list[CheckRequest] = []
        with suppress(queue.Empty):
            found.append(self._questions.get(timeout=timeout_s))
            while len(found) < _TAKEN:
                found.append(self._questions.get_nowait())
        return found

    def close(self) -> None:
        """Give the source up; what was not answered is asked again later, of others."""
        self._closed(self)


class Questions:
    """All sources, by producer group. Thread-safe."""

    def __init__(self) -> None:
        # Guards the sources.
        self._lock = threading.Lock()
        self._sources: dict[str, list[Source]] = {}

    def source(self, group: str) -> Source:
        """Return a new source of the questions to a group."""
        source = Source(lambda closed: self._remove(group, closed))
        with self._lock:
            self._sources.setdefault(group, []).append(source)
        return source

    def anybody(self, group: str) -> bool:
        """Tell whether somebody is there to answer for a group."""
        with self._lock:
            return bool(self._sources.get(group))

    def ask(self, request: CheckRequest) -> bool:
        """Ask the group of a half; tell whether the question was taken."""
        with self._lock:
            sources = self._sources.get(request.half.group)
            if not sources:
                return False
            return sources[request.check_number % len(sources)].offer(request)

    def _remove(self, group: str, source: Source) -> None:
        with self._lock:
            left = [one for one in self._sources.get(group, ()) if one is not source]
            self._sources[group] = left


__all__ = ["Questions", "Source"]
