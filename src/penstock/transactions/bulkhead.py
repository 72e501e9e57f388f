"""A thread pool for a user's function, with a time limit for each call: a hanging call costs one slot, not the process.

A call past its limit is given up: its thread is abandoned (`clients/bounded_calls.py`) and replaced by a new one. If it
returns after all, its result still counts.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

from penstock.clients.bounded_calls import Call, Disposable, LeftBehind
from penstock.errors import raised
from penstock.transactions.model import TransactionState

_log = logging.getLogger("penstock.transactions")

#: Threads that may be given up for each slot. More are not replaced, because memory is limited.
_GIVEN_UP_PER_SLOT = 2


def answer_of(label: str, call: Callable[[], object]) -> TransactionState | None:
    """Return the answer of a user's function; None, with a log line, if it raises or returns anything else."""
    try:
        state = call()
    except:  # noqa: E722 - see `raised`; the user's function may raise anything
        error = raised()
        _log.error("%s raised %s; the answer is UNKNOWN", label, type(error).__name__, exc_info=error)
        return None
    if isinstance(state, TransactionState):
        return state
    _log.error("%s returned a %s instead of a TransactionState; the answer is UNKNOWN", label, type(state).__name__)
    return None


class _Task(NamedTuple):
    label: str
    function: Callable[[], None]
    on_given_up: Callable[[], None]

    def run(self) -> None:
        try:
            self.function()
        except:  # noqa: E722 - see `raised`; a slot must survive its calls
            error = raised()
            _log.error("%s failed with %s", self.label, type(error).__name__, exc_info=error)


class BulkheadPool:
    """Runs calls on `count` daemon threads. Thread-safe; the owner must call `tend` from time to time.

    A call that takes longer than `limit_s` seconds is given up. `name` is the name of the threads.
    """

    def __init__(self, count: int, limit_s: float, name: str) -> None:
        self._count = count
        self._limit_s = limit_s
        self._name = name
        self._left = LeftBehind(name)
        # Guards the fields below.
        self._lock = threading.Lock()
        self._waiting = deque[_Task]()
        self._idle: list[Disposable] = []
        self._busy: dict[Disposable, tuple[_Task, Call[None]]] = {}
        # Threads that were given up and have not returned.
        self._hanging = 0
        self._is_closed = False
        #: Calls that were given up. Written under the lock; reading one number is safe.
        self.hung = 0

    @property
    def is_short(self) -> bool:
        """Whether too many calls hang to replace their threads: waiting calls may never run."""
        return self._hanging > self._count * _GIVEN_UP_PER_SLOT

    def submit(self, label: str, function: Callable[[], None], on_given_up: Callable[[], None] = lambda: None) -> None:
        """Run a call when a slot is free; `label` names it in the log.

        The call must catch its own exceptions; any other is logged and ends no thread. `tend` calls `on_given_up` if
        the call is past its limit.
        """
        with self._lock:
            self._waiting.append(_Task(label, function, on_given_up))
            self._fill()

    def tend(self) -> None:
        """Give up calls that are past their limit, and replace their threads."""
        with self._lock:
            late = [thread for thread, (_, call) in self._busy.items() if call.age_s > self._limit_s]
            given_up = [self._give_up(thread) for thread in late]
            self._fill()
        for task in given_up:
            task.on_given_up()

    def close(self, timeout_s: float) -> bool:
        """Drop waiting calls, wait for running ones at most `timeout_s` seconds, and tell whether all ended.

        Calls that were given up do not count.
        """
        deadline = time.monotonic() + timeout_s
        with self._lock:
            self._is_closed = True
            running = [call for _, call in self._busy.values()]
            for thread in (*self._busy, *self._idle):
                thread.close()
        return all(call.done(max(0.0, deadline - time.monotonic())) for call in running)

    def _fill(self) -> None:
        """Start waiting calls while slots are free; called under the lock."""
        while self._waiting and not self._is_closed:
            if not self._idle and (len(self._busy) >= self._count or self.is_short):
                return
            thread = self._idle.pop() if self._idle else Disposable(self._name, self._left)
            task = self._waiting.popleft()
            self._busy[thread] = task, thread.start(task.label, task.run, partial(self._returned, thread))

    def _returned(self, thread: Disposable) -> None:
        with self._lock:
            if self._busy.pop(thread, None) is None:
                self._hanging -= 1
            else:
                self._idle.append(thread)
            self._fill()

    def _give_up(self, thread: Disposable) -> _Task:
        task, _ = self._busy.pop(thread)
        self._hanging += 1
        self.hung += 1
        _log.error(
            "%s has not returned within %g s: it is given up and its thread replaced (%d hang now); its stack:\n%s",
            task.label,
            self._limit_s,
            self._hanging,
            thread.stack(),
        )
        thread.abandon(lambda: None)
        if self.is_short:
            _log.critical(
                "%d calls of %s hang: no more threads replace them, and fewer than %d run; give the function a time "
                "limit of its own and restart the process",
                self._hanging,
                self._name,
                self._count,
            )
        return task
