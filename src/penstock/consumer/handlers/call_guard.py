"""The call guard: another thread may interrupt a handler call, or abandon the call with its thread.

CPython can raise an exception in another thread (`PyThreadState_SetAsyncExc`), but cannot choose the place. The
exception arrives wherever that thread is by then, and not at all while the thread waits in C. It must arrive within
the call it was meant for. The proof, for one guard; "caller" is the guarded thread, "interrupter" the other one:

- All fields except `is_calling` are written under the guard's lock. `is_calling` and `is_interrupted` are read without
  it. Python runs one thread at a time, so all threads see the writes in one order. The caller writes `is_calling`, True
  before its call and False after it, and then reads `is_interrupted`. The interrupter writes `is_interrupted`, and then
  reads `is_calling`. The later of the two sees the other's write. If the interrupter reads True, the caller has not
  read yet: it finds itself interrupted and waits in `settle` for the decision. If the interrupter reads False, it does
  nothing.
- The lock is held for a few steps or the start of a thread. So the caller waits for the interrupter, and no thread
  waits for the caller. If the interrupter dies while deciding, it releases the lock, and nothing is abandoned.
- When the call ends, the exception may not have arrived, and no API tells. So `settle` raises it again, which replaces
  a pending one, and waits until it arrives. (Raising NULL would take it back. But then the interpreter looks for it at
  every step, and CPython 3.11 never ends a function under a debugger.) One exception may arrive on the way there, once,
  and only within the `try` of `run.handler_calls.call`: between the call's first step and the end of `settle` there are
  only local variables of the caller. It then counts as the outcome of this call.
- A caller that finds its call abandoned touches nothing any more. Its slot, its lane and the generator that processes
  the lane belong to its successor since the decision.

An interrupted call is always a call for one message, because its slice was cut before: see `Slice.cut`.
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
    """A handler call that was given up before it returned. Immutable, except for `ended`."""

    #: Topic, partition and offset of its message; for a batch, of the first message.
    place: tuple[str, int, int]
    #: The handler's name, and whether the call is in a thread or in a task.
    handler: str
    kind: Kind
    #: The new name of the thread or task, and a function that returns its stack.
    worker: str
    stack: Callable[[], Sequence[str]] = field(repr=False)
    #: The start time, on the engine's clock.
    since: float
    #: Done when the call has returned. Its thread or the event loop sets it.
    ended: Future[None] = field(default_factory=Future, init=False)

    @property
    def has_ended(self) -> bool:
        """Whether it has returned. Any thread."""
        return self.ended.done()


class CallAbandonedError(BaseException):
    """The call that ended was abandoned, and another thread has taken over its work. Raised in the old thread only."""

    def __init__(self, call: AbandonedCall) -> None:
        super().__init__(call)
        self.call = call


class CallGuard:
    """Guards the calls of one thread: see the proof above. Only one other thread at a time interrupts."""

    __slots__ = ("_abandoned", "_deciding", "_is_raised", "is_calling", "is_interrupted")

    def __init__(self) -> None:
        self._deciding = threading.Lock()
        self._is_raised = False
        self._abandoned: AbandonedCall | None = None
        #: Whether a call is under way. The guarded thread writes it.
        self.is_calling = False
        #: Whether the guarded thread must call `settle` after its call.
        self.is_interrupted = False

    def interrupt(self, is_under_way: Callable[[], bool], thread_id: int) -> bool:
        """Raise `HandlerTimeLimitError` in the thread if the intended call is under way; return whether it was."""
        with self._deciding:
            self.is_interrupted = True
            if not (self.is_calling and is_under_way()):
                return False
            self._is_raised = True
            _raise_in(thread_id)
        return True

    def abandon(self, is_under_way: Callable[[], bool], call: AbandonedCall, hand_over: Callable[[], object]) -> bool:
        """Give up the call with its thread if the call is under way; return whether it was.

        `hand_over` transfers the thread's slot and lane to another thread.
        """
        with self._deciding:
            self.is_interrupted = True
            if not (self.is_calling and is_under_way()):
                return False
            hand_over()
            self._abandoned = call
        return True

    def settle(self) -> None:
        """Wait until an exception raised in the ended call has arrived, so that none comes later. The thread calls it.

        Raises `CallAbandonedError`. Raises `HandlerTimeLimitError` if that was pending: then the thread calls it again.
        """
        with self._deciding:
            is_raised = self._is_raised
            self._is_raised = self.is_interrupted = False
        if is_raised:
            with suppress(HandlerTimeLimitError):
                _raise_in(threading.get_ident())
                while True:
                    time.sleep(0)
        if self._abandoned is not None:
            raise CallAbandonedError(self._abandoned)


def _raise_in(thread_id: int) -> None:
    """Raise `HandlerTimeLimitError` in a thread at its next Python step."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread_id), ctypes.py_object(HandlerTimeLimitError))
