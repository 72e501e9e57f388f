"""Rate-limited log lines, for warnings that bad input could repeat without end."""

from __future__ import annotations

from penstock.clients.ration import lines, once_in, rationed

_log = rationed("penstock.transactions")

#: Seconds between two log lines of one kind.
_LOG_EVERY_S = 10.0


class RationedLog:
    """Logs one warning of each kind every few seconds."""

    def is_due(self, kind: str) -> bool:
        """Tell whether a line of a kind may be logged now; if so, it counts as logged."""
        return lines.take((self, kind), _LOG_EVERY_S) is not None

    def warn(self, kind: str, text: str, *args: object) -> None:
        """Log a warning unless one of its kind was logged just before; the next line gives the number left out."""
        _log.warning(text, *args, extra=once_in(_LOG_EVERY_S, (self, kind)))
