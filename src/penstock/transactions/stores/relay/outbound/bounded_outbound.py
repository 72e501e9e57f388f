"""An `Outbound` on a thread of its own that can be left behind: its calls are started, and asked for later.

Kafka's client ignores its own time-outs in places; who keeps a store going must not wait in it. A call that does not go
on for a while is left behind with thread and clients; the next one, with the same transactional id, shuts it out.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, TypeVar

from penstock.clients.bounded_calls import Call, Disposable, LeftBehind, NotAnsweredError
from penstock.clients.transactional.pace import Pace
from penstock.transactions.stores.relay.outbound.outbound import Outbound

_log = logging.getLogger("penstock.transactions")

T = TypeVar("T")

#: Seconds within which a call has to go on where brokers are well: longer than any time-out that the client is given.
STEP_LIMIT_S = 8.0
#: Seconds after which a call that does not go on is named in the log and in the coordinator's statistics.
SLOW_S = 2.0
#: A thread says that its call ends a moment before the call is done.
_ENDING_S = 1.0


class BoundedOutbound:
    """One `Outbound` at a time, made, used and closed by a disposable thread. Used by one thread, which never waits.

    The disposable thread calls `make`, and `wake` when a call ends; `left` counts those that are left behind.
    """

    def __init__(
        self,
        make: Callable[[], Outbound],
        name: str,
        left: LeftBehind,
        wake: Callable[[], object],
        pace: Pace | None = None,
    ) -> None:
        self._make = make
        self._name = name
        self._left = left
        self._wake = wake
        self._pace = pace or Pace()
        self._thread: Disposable | None = None
        self._call: Call[Any] | None = None
        # Of the present thread: what it made. Filled by it, read by the owner for its signs of life alone.
        self._made: list[Outbound] = []
        # Set by the thread when a call is about to end.
        self._ending = False
        self._is_logged = False

    @property
    def is_busy(self) -> bool:
        """Whether a call was started whose end was not asked for."""
        return self._call is not None

    def start(self, label: str, work: Callable[[Outbound], T]) -> None:
        """Have something done with the outbound; one is made if there is none."""
        thread = self._thread
        if thread is None:
            self._made = []
            thread = self._thread = Disposable(f"penstock-outbound-{self._name}", self._left)
        made, self._ending, self._is_logged = self._made, False, False

        def run() -> T:
            try:
                if not made:
                    made.append(self._make())
                return work(made[0])
            finally:
                if self._made is made:
                    self._ending = True
                    self._wake()

        self._call = thread.start(f"{label} of {self._name}", run)

    def ended(self) -> Call[Any] | None:
        """Return the call if it has ended; then another may be started.

        Raises `NotAnsweredError` where it did not go on for too long, and was left behind.
        """
        call = self._call
        if call is None:
            return None
        if call.done(_ENDING_S if self._ending else 0.0):
            self._call = None
            return call
        name, silent_s = self._stands(call)
        if silent_s > STEP_LIMIT_S + self._pace.limit(0.0):
            self.leave()
            raise NotAnsweredError(
                f"{name} did not go on for {silent_s:.0f} s, after {call.age_s:.0f} s: it was left behind"
            )
        if silent_s > SLOW_S and not self._is_logged:
            self._is_logged = True
            _log.warning("%s has not gone on for %.1f s, after %.0f s", name, silent_s, call.age_s)
        return None

    def slow_call(self) -> tuple[str, float]:
        """Return what has not gone on for long, and for how many seconds; an empty name where all does."""
        call = self._call
        if call is None or call.done():
            return "", 0.0
        name, silent_s = self._stands(call)
        return (name, silent_s) if silent_s > SLOW_S else ("", 0.0)

    def _stands(self, call: Call[Any]) -> tuple[str, float]:
        """Return what a call does, and for how many seconds it has not gone on."""
        # A list's items are read in one step.
        made = list(self._made)
        active_at = max([call.since, *(one.active_at for one in made)])
        doing = next((one.doing for one in made if one.active_at > call.since), "")
        return f"{doing} in {call.label}" if doing else call.label, time.monotonic() - active_at

    def leave(self) -> Call[None] | None:
        """Give the outbound up, with whatever it is doing; it is closed by its own thread, if that ever returns.

        Returns the closing, unless it comes behind something else, or there is nothing to close.
        """
        thread, self._thread, self._call = self._thread, None, None
        made, self._made = self._made, []
        if thread is None:
            return None
        if thread.running is not None:
            thread.leave(lambda: _close(made))
            return None
        closing = thread.start(f"close of {self._name}", lambda: _close(made))
        thread.close()
        return closing

    def close(self, limit_s: float) -> None:
        """Close it as `leave` does, and wait at most so many seconds until it is closed."""
        closing = self.leave()
        if closing is not None:
            closing.done(limit_s)


def _close(made: list[Outbound]) -> None:
    while made:
        made.pop().close()
