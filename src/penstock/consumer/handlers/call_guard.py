"""The guard of calls in a thread: another thread may interrupt the call under way, or abandon it with its thread.

CPython can raise an exception in another thread (`PyThreadState_SetAsyncExc`), but not say at what. It arrives wherever
that thread is by then, and not at all while the thread waits within C. So it must be certain that it arrives within the
call that it was meant for. The argument, for one guard:

- All fields but `is_calling` are written under the guard's lock. `is_calling` and `is_interrupted` are read without it;
  Python runs one thread at a time, so all see writes in one order. The thread writes `is_calling`, True before its call
  and False after it, and then reads `is_interrupted`. Who interrupts writes `is_interrupted`, and then reads
  `is_calling`. Whichever is later sees the other's write. Where the second reads True, the first has still to look,
  finds itself interrupted, and waits in `settle` until that is decided. Where the second reads False, it does nothing.
- The lock is held for a few steps or the start of a thread. So the thread waits for whoever interrupts it, and nobody
  waits for the thread. Who dies while deciding releases the lock, and nothing is abandoned then.
- What is raised may not have arrived when the call ends; nobody can tell. So `settle` raises it once more, which
  replaces one that is still to come, and waits until it arrives. (To take it back, by raising NULL, leaves the
  interpreter looking for it at every step: CPython 3.11 then never ends a function under a debugger.) One may arrive on
  the way there, once, and only within the `try` of `run.handler_calls.call`: between the call's first step and
  the end of `settle` is nothing but local variables of that thread. It then counts as this call's outcome.
- A thread that finds its call abandoned touches nothing any more: its slot, its lane and the generator that processes
  it belong to its successor, who has them since the decision.

An interrupted call is one message's, for its slice was cut before: see `Slice.cut`.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field

from penstock.consumer.handlers.handler import Kind
from penstock.errors import HandlerTimeLimitError


@dataclass(slots=True, eq=False)
class AbandonedCall:
    """A call of a handler that was given up though it has not returned. Immutable, save for `ended`."""

    #: Topic, partition and offset of its message, of a batch of the first.
    place: tuple[str, int, int]
    #: The handler's name, and whether it is in a thread or in a task.
    handler: str
    kind: Kind
    #: The name of the thread or task, as it is from then on, and what returns its stack.
    worker: str
    stack: Callable[[], Sequence[str]] = field(repr=False)
    #: When it began, on the engine's clock.
    since: float
    #: Done when it has returned. Set by its thread, or by the event loop's.
    ended: Future[None] = field(default_factory=Future, init=False)

    @property
    def has_ended(self) -> bool:
        """Whether it has returned. Any thread."""
        return self.ended.done()


class CallAbandonedError(BaseException):
    """The call that ended was abandoned: another thread has what this one was at. For that thread alone."""

    def __init__(self, call: AbandonedCall) -> None:
        super().__init__(call)
        self.call = call


class CallGuard:
    """Guards the calls of one thread: see the argument above. One other thread at a time interrupts."""

    __slots__ = ("_abandoned", "_deciding", "_is_raised", "is_calling", "is_interrupted")

    def __init__(self) -> None:
        self._deciding = threading.Lock()
        self._is_raised = False
        self._abandoned: AbandonedCall | None = None
        #: Whether a call is under way. Written by the thread.
        self.is_calling = False
        #: Whether `settle` has something to do when the call has ended.
        self.is_interrupted = False

    def interrupt(self, is_under_way: Callable[[], bool], thread_id: int) -> bool:
        """Raise `HandlerTimeLimitError` in the thread, where the call that is meant is under way; return whether."""
        with self._deciding:
            self.is_interrupted = True
            if not (self.is_calling and is_under_way()):
                return False
            self._is_raised = True
            _raise_in(thread_id)
        return True

    def abandon(self, is_under_way: Callable[[], bool], call: AbandonedCall, hand_over: Callable[[], object]) -> bool:
        """Give the call up with its thread, where it is under way; return whether.

        `hand_over` gives all that the thread has to another.
        """
        with self._deciding:
            self.is_interrupted = True
            if not (self.is_calling and is_under_way()):
                return False
            hand_over()
            self._abandoned = call
        return True

    def settle(self) -> None:
        """Let what was raised in the call that has ended arrive, so that nothing of it comes later. By the thread.

        Raises `CallAbandonedError`, and `HandlerTimeLimitError` where that was on its way: then it is called again.
        """
        with self._deciding:
            is_raised = self._is_raised
            self._is_raised = self.is_interrupted = False
        if is_raised:
            _let_it_arrive()
        if self._abandoned is not None:
            raise CallAbandonedError(self._abandoned)


def _raise_in(thread_id: int) -> None:
    """Raise `HandlerTimeLimitError` in a thread, at its next step in Python."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread_id), ctypes.py_object(HandlerTimeLimitError))


def _let_it_arrive() -> None:
    with suppress(HandlerTimeLimitError):
        _raise_in(threading.get_ident())
        while True:
            time.sleep(0)
