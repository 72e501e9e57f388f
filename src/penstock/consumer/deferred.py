"""`DeferredCompletion`: a handler's promise to say later whether a message is done."""

from __future__ import annotations

import threading
from collections.abc import Callable

Settle = Callable[[BaseException | None], None]


class DeferredCompletion:
    """Returned by a handler whose work goes on elsewhere: in another thread pool, in a callback of some client.

    The message is done when `complete` is called, and failed (so: retried by its policy) when `fail` is. Until then its
    key waits, and nothing at or above its offset is committed. Thread-safe; the first call decides, later ones change
    nothing.
    """

    __slots__ = ("_lock", "_outcome", "_settle")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._outcome: tuple[BaseException | None] | None = None
        self._settle: Settle | None = None

    def complete(self) -> bool:
        """Say that the message is done. Returns whether this call decided it."""
        return self._decide(None)

    def fail(self, error: BaseException) -> bool:
        """Say that the message failed. Returns whether this call decided it."""
        return self._decide(error)

    @property
    def decided(self) -> bool:
        """Whether the message is done or failed."""
        return self._outcome is not None

    def _decide(self, error: BaseException | None) -> bool:
        with self._lock:
            if self._outcome is not None:
                return False
            self._outcome = (error,)
            settle = self._settle
        if settle is not None:
            settle(error)
        return True

    def _attach(self, settle: Settle) -> None:
        """Tell who wants to know. Called by the engine when the handler returned this; at once where it is decided."""
        with self._lock:
            if self._settle is not None:
                raise RuntimeError("a DeferredCompletion was returned twice; make a new one for each message")
            self._settle = settle
            outcome = self._outcome
        if outcome is not None:
            settle(outcome[0])


__all__ = ["DeferredCompletion"]
