"""The stop request of a consumer: drain or leave, the deadline, and the error that ended the consumer."""

from __future__ import annotations

import logging
import threading
from math import inf

from penstock.clients.cluster import Clock
from penstock.consumer.failure_text import attached, failure_text, short_text
from penstock.consumer.settings import ConsumerSettings

_log = logging.getLogger(__name__)


class StopRequest:
    """The stop request. Any thread writes it, and the poll thread obeys.

    A signal handler writes it too, and may interrupt a thread in this very code, so a lock could deadlock. Therefore
    all fields except `failure` are plain, and change in one direction only. `failure` is written once, under the lock.
    """

    def __init__(self, settings: ConsumerSettings, clock: Clock) -> None:
        self._clock = clock
        self._stop_timeout = settings.stop_timeout
        self._revoke_timeout = settings.revoke_timeout
        #: Whether to drain and leave, and whether to leave without draining.
        self.is_requested = False
        self.leaves_now = False
        # The end of the drain, and the end of a stop without a drain, on the engine's clock.
        self._drain_by = inf
        self._leave_by = inf
        self._fail_lock = threading.Lock()
        #: The error that ended the consumer, or None.
        self.failure: BaseException | None = None

    def drain(self, timeout_s: float | None = None) -> None:
        """Request a drain of `timeout_s` seconds, by default `stop_timeout`. Any thread; safe in a signal handler.

        The time counts from the first request: a later one can only shorten it.
        """
        wanted = self._clock.monotonic() + (self._stop_timeout if timeout_s is None else timeout_s)
        if timeout_s is not None or not self.is_requested:
            self._drain_by = min(self._drain_by, wanted)
        self.is_requested = True

    def leave(self, grace_s: float | None = None) -> None:
        """Request a stop without a drain. Running handlers have `grace_s` seconds, by default `revoke_timeout`.

        Any thread; safe in a signal handler.
        """
        grace_s = self._revoke_timeout if grace_s is None else grace_s
        self._leave_by = min(self._leave_by, self._clock.monotonic() + grace_s)
        self.leaves_now = self.is_requested = True

    def fail(self, error: BaseException, *, drains: bool = False) -> None:
        """Stop the consumer because of an error, at once or after a drain. Any thread. The first error counts."""
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
        """The end of waiting for running handlers, on the engine's clock; infinity before a stop was requested.

        The drain, the revocation after it and the end of the workers share this one deadline.
        """
        return min(self._drain_by, self._leave_by)
