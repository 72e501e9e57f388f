"""The check sources of a file store: the producers of its process that can answer checks, and the checks sent to each.

A producer that can answer has a source here. Each attempt to ask goes to another one, where there are several.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress

from penstock.transactions.wire.check_request import CheckRequest

#: Checks that may wait for one producer; what is more is sent later.
_WAITING = 1_000
_TAKEN = 500


class FileCheckSource:
    """The checks sent to one producer. `take` and `close` are used by one thread."""

    def __init__(self, closed: Callable[[FileCheckSource], None]) -> None:
        self._waiting: queue.Queue[CheckRequest] = queue.Queue(_WAITING)
        self._closed = closed

    def offer(self, request: CheckRequest) -> bool:
        """Send a check, and tell whether there was room for it."""
        try:
            self._waiting.put_nowait(request)
        except queue.Full:
            return False
        return True

    def take(self, timeout_s: float, running: Collection[str] = ()) -> Sequence[CheckRequest]:  # noqa: ARG002 - each is sent to one
        """Return the checks that are there, waiting at most `timeout_s` seconds for the first."""
        found: list[CheckRequest] = []
        with suppress(queue.Empty):
            found.append(self._waiting.get(timeout=timeout_s))
            while len(found) < _TAKEN:
                found.append(self._waiting.get_nowait())
        return found

    def close(self) -> None:
        """Give the source up; what was not answered is sent again later, to others."""
        self._closed(self)


class CheckSources:
    """All sources, by producer group. Thread-safe."""

    def __init__(self) -> None:
        # Guards the sources.
        self._lock = threading.Lock()
        self._sources: dict[str, list[FileCheckSource]] = {}

    def add(self, group: str) -> FileCheckSource:
        """Return a new source of the checks of a group."""
        source = FileCheckSource(lambda closed: self._remove(group, closed))
        with self._lock:
            self._sources.setdefault(group, []).append(source)
        return source

    def has_any(self, group: str) -> bool:
        """Tell whether a producer of a group is there to answer."""
        with self._lock:
            return bool(self._sources.get(group))

    def send(self, request: CheckRequest, attempt: int) -> bool:
        """Send a check to a producer of its group; tell whether it was taken."""
        with self._lock:
            sources = self._sources.get(request.half.group)
            if not sources:
                return False
            return sources[attempt % len(sources)].offer(request)

    def _remove(self, group: str, source: FileCheckSource) -> None:
        with self._lock:
            left = [one for one in self._sources.get(group, ()) if one is not source]
            self._sources[group] = left
