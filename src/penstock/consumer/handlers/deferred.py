"""`DeferredCompletion`: a handler's promise to say later whether a message is done."""

from __future__ import annotations

import threading
from collections.abc import Callable

from penstock.errors import PenstockError
from penstock.options import positive

#: Called with the error of a completion that failed, or None.
OnDecided = Callable[[BaseException | None], None]


class DeferredCompletion:
    """Returned by a handler whose work goes on elsewhere: in another thread pool, in a callback of some client.

    The message is done when `complete` is called, and failed (so: retried by its policy) when `fail` is. Until then its
    key waits, and nothing at or above its offset is committed. Thread-safe; the first call decides, later ones change
    nothing. It belongs to one message: one that is returned a second time is a failure of the message it came with.

    Args:
        timeout: seconds from its return after which it counts as failed; None (default) for never.

    Raises:
        ConfigurationError: `timeout` is no number above zero.
    """

    __slots__ = ("_bound", "_lock", "_on_decided", "_outcome", "timeout")

    def __init__(self, timeout: float | None = None) -> None:
        if timeout is not None:
            positive("timeout", timeout)
        self.timeout = timeout
        self._lock = threading.Lock()
        self._bound = False
        self._outcome: tuple[BaseException | None] | None = None
        self._on_decided: OnDecided | None = None

    def complete(self) -> bool:
        """Say that the message is done. Returns whether this call decided it."""
        return self._decide(None)

    def fail(self, error: BaseException) -> bool:
        """Say that the message failed. Returns whether this call decided it.

        Args:
            error: why. What is no exception, such as an error object of some client, counts as a failure all the same.
        """
        given: object = error
        if isinstance(given, BaseException):
            return self._decide(given)
        return self._decide(
            PenstockError(f"the completion was failed with a {type(given).__name__}, which is no exception")
        )

    @property
    def decided(self) -> bool:
        """Whether the message is done or failed."""
        return self._outcome is not None

    def _decide(self, error: BaseException | None) -> bool:
        with self._lock:
            if self._outcome is not None:
                return False
            self._outcome = (error,)
            # Released: a completion that its user keeps must not keep the message.
            on_decided, self._on_decided = self._on_decided, None
        if on_decided is not None:
            on_decided(error)
        return True

    def _take(self) -> bool:
        """Bind it to a message; return False where it is bound already. Called by the engine, first."""
        with self._lock:
            bound, self._bound = self._bound, True
        return not bound

    def _attach(self, on_decided: OnDecided) -> None:
        """Set the callback, or call it at once where the outcome is known. By the engine."""
        with self._lock:
            outcome = self._outcome
            if outcome is None:
                self._on_decided = on_decided
        if outcome is not None:
            on_decided(outcome[0])
