"""Work that an event loop has done on threads of its own, which are abandoned where they hang."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

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
        # Guards the count, which threads lower when they end.
        self._lock = threading.Lock()
        self._running = 0

    async def run(self, work: Callable[[], ResultT]) -> ResultT:
        """Return what the work returns, or raise what it raises; `TooManyError`, or `TimeoutError` after the limit."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[ResultT] = loop.create_future()

        def settle(how: Callable[[Any], None], what: object) -> None:
            # The loop may have ended meanwhile.
            with suppress(RuntimeError):
                loop.call_soon_threadsafe(lambda: None if done.done() else how(what))

        def body() -> None:
            try:
                found = work()
            except Exception as error:  # noqa: BLE001 - it is raised where it is waited for
                settle(done.set_exception, error)
            else:
                settle(done.set_result, found)

        self.start(body)
        return await asyncio.wait_for(done, self.limit_s)

    def start(self, work: Callable[[], object]) -> None:
        """Have something done that nobody waits for; `TooManyError`."""
        with self._lock:
            if self._running >= self.most:
                raise TooManyError(f"{self.most} are under way; wait until one has ended")
            self._running += 1

        def body() -> None:
            try:
                work()
            finally:
                with self._lock:
                    self._running -= 1

        threading.Thread(target=body, name=self._name, daemon=True).start()
