"""Where the page's groups come from: the topic of reports, or a process that shows itself (`probes/`).

All methods are for the hub's thread. Nothing here ends it: what is wrong is told by `trouble`, and tried
again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Protocol

from penstock.errors import PenstockError, TopicNotFoundError
from penstock.fleet.reports.group_state import Group
from penstock.fleet.reports.reader import ReportReader
from penstock.options import ClientConfig

_log = logging.getLogger(__name__)

#: Seconds between two tries to read the topic.
_AGAIN_S = 2.0


class Source(Protocol):
    """Tells of groups."""

    @property
    def trouble(self) -> str | None:
        """Why nothing newer is known, or None."""

    @property
    def ignored(self) -> Mapping[str, int]:
        """Records that were passed over, by why."""

    def follow(self, timeout: float) -> None:
        """Wait for news, at most `timeout` seconds."""

    def groups(self) -> Sequence[Group]:
        """Return all groups by name, at this moment."""

    def close(self) -> None:
        """Read no more."""


class ReportSource:
    """All groups, from the topic of reports. It waits for a topic or a broker that is not there yet.

    Args:
        bootstrap_servers: addresses of the brokers.
        config: client settings by librdkafka's names.
        topic: name of the topic.
    """

    def __init__(self, bootstrap_servers: str, config: ClientConfig, topic: str) -> None:
        self._made_of = (bootstrap_servers, config, topic)
        self._reader: ReportReader | None = None
        self._reading = ExitStack()
        self._trouble: str | None = "nothing was read yet"
        self._last: Sequence[Group] = ()

    @property
    def trouble(self) -> str | None:
        """As `Source` says."""
        return self._trouble if self._reader is None else self._reader.trouble

    @property
    def ignored(self) -> Mapping[str, int]:
        """As `Source` says."""
        return {} if self._reader is None else self._reader.states.ignored

    def follow(self, timeout: float) -> None:
        """As `Source` says."""
        try:
            if self._reader is None:
                self._reader = self._reading.enter_context(ReportReader(*self._made_of))
                self._trouble = None
            else:
                self._reader.follow(timeout)
        except PenstockError as error:
            # A broker or a right is gone, or the topic is not there yet.
            if str(error) != self._trouble:
                _log.log(logging.INFO if isinstance(error, TopicNotFoundError) else logging.WARNING, "%s", error)
            self.close()
            self._trouble = str(error)
            time.sleep(min(timeout, _AGAIN_S))

    def groups(self) -> Sequence[Group]:
        """As `Source` says; what was known last, while nothing can be read."""
        if self._reader is not None:
            self._last = self._reader.groups()
        return self._last

    def close(self) -> None:
        """As `Source` says."""
        self._reader = None
        self._reading.close()
