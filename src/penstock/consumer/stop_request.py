"""The request to stop: whether a consumer drains or leaves, until when, and the error that ended it."""

from __future__ import annotations

import logging
import threading
from math import inf

from penstock.clients.cluster import Clock
from penstock.consumer.failure_text import attached, failure_text, short_text
from penstock.consumer.settings import ConsumerSettings

_log = logging.getLogger(__name__)


class StopRequest:
    """Asked for by any thread, obeyed by the poll thread.

    All fields but `failure` are plain, and only ever raised or lowered: a signal handler asks too, on a thread that may
    stand within this very code, so there is no lock that it could meet. `failure` is written once, under the lock.
    """

    def __init__(self, settings: ConsumerSettings, clock: Clock) -> None:
        self._clock = clock
        self._stop_timeout = settings.stop_timeout
        self._revoke_timeout = settings.revoke_timeout
        #: Whether to drain and leave, and whether to leave without draining.
        self.is_requested = False
        self.leaves_now = False
        # When the drain ends, and when one that is cut short does, on the engine's clock.
        self._drain_by = inf
        self._leave_by = inf
        self._fail_lock = threading.Lock()
        #: The error that ended the consumer, or None.
        self.failure: BaseException | None = None

    def drain(self, timeout_s: float | None = None) -> None:
        """Ask for a drain of so many seconds, `stop_timeout` when left out. Any thread; safe in a signal handler.

        The time counts from the first request: a later one can only shorten it.
        """
        wanted = self._clock.monotonic() + (self._stop_timeout if timeout_s is None else timeout_s)
        if timeout_s is not None or not self.is_requested:
            self._drain_by = min(self._drain_by, wanted)
        self.is_requested = True

    def leave(self, grace_s: float | None = None) -> None:
        """Ask to leave undrained; running handlers have so many seconds, `revoke_timeout` when left out.

        Any thread; safe in a signal handler.
        """
        grace_s = self._revoke_timeout if grace_s is None else grace_s
        self._leave_by = min(self._leave_by, self._clock.monotonic() + grace_s)
        self.leaves_now = self.is_requested = True

    def fail(self, error: BaseException, *, drains: bool = False) -> None:
        """Stop the consumer because of an error, at once or after a drain. Any thread; the first error is kept."""
        with self._fail_lock:
            if self.failure is not None:
                return
            self.failure = error
        _log.error("the consumer stops: %s\n%s", short_text(error), failure_text(error), extra=attached(error))
        if drains:
            self.drain()
        else:
            self.leave()

    @property
    def end_by(self) -> float:
        """When running handlers are waited for no longer, on the engine's clock; infinity before a stop was requested.

        One time for the drain, the revocation that follows it and the end of the workers: they share it.
        """
        return min(self._drain_by, self._leave_by)
