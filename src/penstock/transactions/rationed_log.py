"""Log lines that bad input could repeat without end."""

from __future__ import annotations

from penstock.clients.ration import lines, once_in, rationed

_log = rationed("penstock.transactions")

#: Seconds between two log lines of one kind; the counts tell the rest.
_LOG_EVERY_S = 10.0


class RationedLog:
    """Warnings that bad input could repeat without end: one of each kind every few seconds."""

    def is_due(self, kind: str) -> bool:
        """Tell whether a line of a kind may be logged, which counts as logged then: none was a moment ago."""
        return lines.take((self, kind), _LOG_EVERY_S) is not None

    def warn(self, kind: str, text: str, *args: object) -> None:
        """Log a warning, unless one of its kind was logged a moment ago; it says then how many were left out."""
        _log.warning(text, *args, extra=once_in(_LOG_EVERY_S, (self, kind)))
