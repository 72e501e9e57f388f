"""Threads that run a user's function, each call for a limited time: a call that hangs costs one slot, not the process.

Python cannot end a thread. A call past its limit is given up: its thread is replaced by a new one, and should it
return after all, its result still counts and the thread ends. The threads are daemons, so that none of them keeps the
process from ending; the ones of `concurrent.futures` are joined when the interpreter ends.
"""

from __future__ import annotations

import logging
import queue
import sys
import threading
import time
import traceback
from collections.abc import Callable

from penstock.errors import raised

_log = logging.getLogger("penstock.transactions")

#: For each slot so many threads may be given up; more are not replaced, for a process has no endless memory.
_GIVEN_UP_PER_SLOT = 2

Task = tuple[str, Callable[[], None], Callable[[], None] | None]


class _Slot:
    """One thread and what it runs. All fields are guarded by the lock of its `BulkheadPool`, bar the thread itself."""

    __slots__ = ("given_up", "label", "on_given_up", "since", "thread")

    def __init__(self, serve: Callable[[_Slot], None], name: str) -> None:
        self.label = ""
        self.on_given_up: Callable[[], None] | None = None
        #: Monotonic seconds at which its call began, or None while it waits for one.
        self.since: float | None = None
        #: Its call hangs, and another thread has taken its place.
        self.given_up = False
        self.thread = threading.Thread(target=serve, args=(self,), name=name, daemon=True)


class BulkheadPool:
    """Runs calls on `count` daemon threads. Thread-safe; `tend` must be called now and then.

    A call that takes longer than `limit_s` seconds is given up. The names of the threads begin with `name`.
    """

    def __init__(self, count: int, limit_s: float, name: str) -> None:
        self._count = count
        self._limit_s = limit_s
        self._name = name
        self._tasks: queue.SimpleQueue[Task | None] = queue.SimpleQueue()
        # Set by close(), read by the threads.
        self._closing = threading.Event()
        # Guards the fields below and those of each slot.
        self._lock = threading.Lock()
        self._live: list[_Slot] = []
        self._given_up: list[_Slot] = []
        #: Calls that were given up. Written under the lock; reading one number is safe.
        self.hung = 0

    @property
    def is_short(self) -> bool:
        """Whether so many calls hang that no more threads replace theirs: what waits may never have its turn."""
        with self._lock:
            return self._is_short()

    def submit(self, label: str, call: Callable[[], None], on_given_up: Callable[[], None] | None = None) -> None:
        """Run a call when a slot is free; `label` says in the log what it is.

        The call must catch its own exceptions; one that gets out is logged, whatever it is, and ends no thread.
        `on_given_up` is called by `tend` if the call is past its limit.
        """
        self._tasks.put((label, call, on_given_up))
        with self._lock:
            if len(self._live) < self._count and not self._closing.is_set() and not self._is_short():
                self._add()

    def tend(self) -> None:
        """Give up calls that are past their limit, and put new threads in their places."""
        now = time.monotonic()
        with self._lock:
            hanging = [s for s in self._live if s.since is not None and now - s.since > self._limit_s]
            to_tell = [slot.on_given_up for slot in hanging if slot.on_given_up is not None]
            for slot in hanging:
                self._give_up(slot)
                if not self._is_short() and not self._closing.is_set():
                    self._add()
        for tell in to_tell:
            tell()

    def close(self, timeout_s: float) -> bool:
        """Drop the calls that wait, let those that run end within `timeout_s` seconds, and tell whether they did.

        Calls that were given up are not waited for.
        """
        self._closing.set()
        with self._lock:
            live = list(self._live)
        for _ in live:
            self._tasks.put(None)
        deadline = time.monotonic() + timeout_s
        for slot in live:
            slot.thread.join(max(0.0, deadline - time.monotonic()))
        return not any(slot.thread.is_alive() for slot in live)

    def _is_short(self) -> bool:
        return len(self._given_up) > self._count * _GIVEN_UP_PER_SLOT

    def _add(self) -> None:
        slot = _Slot(self._serve, self._name)
        self._live.append(slot)
        slot.thread.start()

    def _give_up(self, slot: _Slot) -> None:
        slot.given_up = True
        self._live.remove(slot)
        self._given_up.append(slot)
        self.hung += 1
        frame = sys._current_frames().get(slot.thread.ident or 0)  # noqa: SLF001 - documented
        where = "".join(traceback.format_stack(frame)[-3:]) if frame is not None else "its thread has ended"
        _log.error(
            "%s has not returned within %g s: it is given up and its thread replaced (%d hang now); it is at\n%s",
            slot.label,
            self._limit_s,
            len(self._given_up),
            where,
        )
        if self._is_short():
            _log.critical(
                "%d calls of %s hang: no more threads replace them, and fewer than %d run; give the function a time "
                "limit of its own and restart the process",
                len(self._given_up),
                self._name,
                self._count,
            )

    def _serve(self, slot: _Slot) -> None:
        while (task := self._tasks.get()) is not None and not self._closing.is_set():
            label, call, on_given_up = task
            with self._lock:
                slot.label, slot.on_given_up, slot.since = label, on_given_up, time.monotonic()
            try:
                call()
            except:  # noqa: E722 - see `raised`; a slot outlives whatever runs in it
                error = raised()
                _log.error("%s failed with %s", label, type(error).__name__, exc_info=error)
            # Or what it was about would stay in memory until the next call.
            del task, call, on_given_up
            if not self._goes_on(slot):
                return

    def _goes_on(self, slot: _Slot) -> bool:
        """Note that a call has returned, and tell whether its thread shall take another."""
        with self._lock:
            slot.since, slot.on_given_up = None, None
            if not slot.given_up:
                return True
            self._given_up.remove(slot)
            if len(self._live) >= self._count:
                return False
            # Nobody took its place: too many hung. It is needed after all.
            slot.given_up = False
            self._live.append(slot)
            return True
