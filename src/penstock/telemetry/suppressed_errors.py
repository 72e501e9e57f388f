"""Telemetry's own failures, of samplers and span processors that may be anybody's code: logged, never raised."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

_log = logging.getLogger(__name__)


class SuppressedErrors:
    """Logs failures: the first as a warning, the others, which may come with each message, at debug level."""

    def __init__(self, group: str) -> None:
        self._group = group
        # Any thread sets it; two first warnings at once do no harm.
        self._warned = False

    def log(self) -> None:
        """Log the exception that is being handled."""
        level = logging.DEBUG if self._warned else logging.WARNING
        self._warned = True
        _log.log(
            level,
            "telemetry of consumer %s failed; messages are handled all the same. Look at the tracer and meter "
            "providers' samplers, processors and readers; further failures are logged at debug level",
            self._group,
            exc_info=True,
        )

    @contextmanager
    def instead_of_raising(self) -> Iterator[None]:
        """Log what is raised within."""
        try:
            yield
        except Exception:  # noqa: BLE001 - see the module's first paragraph
            self.log()
