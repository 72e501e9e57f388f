"""Suppresses failures of telemetry, for example of a user's sampler or span processor: logged, never raised."""

from __future__ import annotations

import logging

_log = logging.getLogger(__name__)


class SuppressedErrors:
    """Logs exceptions within its block: the first as a warning, later ones, maybe one a message, as debug."""

    def __init__(self, group: str) -> None:
        self._group = group
        # Any thread sets it; two first warnings at once do no harm.
        self._warned = False

    def log(self, error: BaseException) -> None:
        """Log a failure."""
        level = logging.DEBUG if self._warned else logging.WARNING
        self._warned = True
        _log.log(
            level,
            "telemetry of consumer %s failed; messages are handled all the same. Look at the tracer and meter "
            "providers' samplers, processors and readers; further failures are logged at debug level",
            self._group,
            exc_info=error,
        )

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _stack: object) -> bool:
        if not isinstance(error, Exception):
            return False
        self.log(error)
        return True
