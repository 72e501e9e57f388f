"""Work that an event loop has done on threads of its own, which are abandoned where they hang."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from penstock.clients.bounded_calls import Call
from penstock.errors import PenstockError

ResultT = TypeVar("ResultT")


class TooManyError(PenstockError):
    """As many are at work as may be."""


class DisposableThreads:
    """Daemon threads, for the thread of an event loop: one for each piece of work, which no pool waits for at the end.

    Args:
        name: of the threads.
        most: threads at a time, those included that were abandoned and still run.
        limit_s: seconds that the loop waits for one.
    """

    def __init__(self, name: str, most: int, limit_s: float) -> None:
        self._name = name
        self.most = most
        self.limit_s = limit_s
        # The loop's thread's alone; the threads end the calls.
        self._calls: list[Call[Any]] = []

    async def run(self, work: Callable[[], ResultT]) -> ResultT:
        """Return what the work returns, or raise what it raises; `TooManyError`, or `TimeoutError` after the limit."""
        return await asyncio.wait_for(asyncio.wrap_future(self.start(work)), self.limit_s)

    def start(self, work: Callable[[], ResultT]) -> Call[ResultT]:
        """Have something done that nobody waits for; `TooManyError`."""
        self._calls = [call for call in self._calls if not call.done()]
        if len(self._calls) >= self.most:
            raise TooManyError(f"{self.most} are under way; wait until one has ended")
        call = Call(self._name, work)
        # From now on nobody cancels it: who waits no longer leaves it to its thread.
        call.set_running_or_notify_cancel()
        self._calls.append(call)
        threading.Thread(target=call.run, name=self._name, daemon=True).start()
        return call
