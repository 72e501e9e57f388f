"""The hub: one thread that follows a source and keeps its history, and the states that browsers request.

If the source is unavailable, for example while its topic or broker is absent, the hub tries again. Meanwhile it shows
the last known state, with the reason.

A state is made only on request, once per view for all browsers, at most once a second. A browser asks for the next
state after its own (long polling): a slow browser misses the states in between. The hub's thread never waits for one.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Protocol, Self

from penstock.clients.ration import once_in, rationed
from penstock.errors import PenstockError, TopicNotFoundError
from penstock.fleet.page.history import STEP_S, History
from penstock.fleet.page.snapshot import group_view, overview, overview_history, shown_places
from penstock.fleet.reports.group_state import Group

_log = rationed(__name__)

#: The least seconds between two states for a browser.
_STATE_INTERVAL_S = 1.0
#: Seconds of one wait for news, of a browser's wait for a state, and of the wait for the thread at the end.
_NEWS_WAIT_S = 0.25
_ANSWER_S = 10.0
_JOIN_S = 2.0
#: Seconds between two attempts to open the source.
_RETRY_DELAY_S = 1.0
#: Seconds between two log lines about states that cannot be made.
_LOG_INTERVAL_S = 60.0
#: Seconds for which a message stays readable after the page named it last: a user may still look at it.
_READABLE_S = 120.0


class Source(Protocol):
    """The source of the page's groups. For the hub's thread, which opens it again after an exception."""

    @property
    def trouble(self) -> str | None:
        """The text of the page's banner, or None."""

    @property
    def is_stale(self) -> bool:
        """Whether nothing newer is known than an earlier state."""

    @property
    def ignored(self) -> Mapping[str, int]:
        """The number of ignored records, by reason."""

    def follow(self, timeout: float) -> object:
        """Wait for news, at most `timeout` seconds."""

    def groups(self) -> Sequence[Group]:
        """Return all groups at this moment, sorted by name."""


class Hub:
    """Follows a source until it is stopped. A context manager.

    Args:
        open_source: returns the source; the hub's thread enters it.
        of: the name of the source on the page.
        shown: what the page offers: `messages`, whether it shows the content of messages that it names; `stacks`,
            whether it shows those of blocking calls; `actions`, their names.
    """

    def __init__(
        self,
        open_source: Callable[[], AbstractContextManager[Source]],
        of: str,
        shown: Mapping[str, Any],
    ) -> None:
        self._open_source = open_source
        self._shows_messages = shown["messages"]
        self._thread = threading.Thread(target=self._run, name="penstock-page", daemon=True)
        self._stopping = threading.Event()
        # The lock of the fields below; it is notified of new groups and at the end. The hub's thread writes groups and
        # history. Browsers' threads make states of them, and write the time of their request.
        self._changed = threading.Condition()
        self._groups: Sequence[Group] = ()
        self._head: dict[str, Any] = {"of": of, **shown}
        # The times of the last groups, of the last point of the history and of the last request (monotonic clock).
        self._made_at = self._point_at = self._asked_at = 0.0
        self._history = History()
        # The states made of these groups, by group, member, and whether they have the history.
        self._states: dict[tuple[str | None, str | None, bool], bytes] = {}
        # The time at which the page last named a message.
        self._named: dict[tuple[str, int, int], float] = {}
        # Only the hub's thread uses these: the source's last trouble, and its ignored records.
        self._trouble: str | None = None
        self._ignored: Mapping[str, int] = {}

    def __enter__(self) -> Self:
        """Start the thread."""
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop within seconds; a hanging call of the client is abandoned with the thread."""
        self._stopping.set()
        with self._changed:
            self._changed.notify_all()
        self._thread.join(_JOIN_S)

    def listening(self, group: str) -> frozenset[str]:
        """Return the members of a group that report that they receive commands. Any thread."""
        with self._changed:
            members = [member for found in self._groups if found.name == group for member in found.members]
        return frozenset(member.report.member for member in members if member.report.commands and not member.is_silent)

    def names(self, topic: str, partition: int, offset: int) -> bool:
        """Return whether the page names this message, or named it a moment ago. Any thread."""
        with self._changed:
            return (topic, partition, offset) in self._named

    def state(self, group: str | None = None, member: str | None = None, after: float = 0.0) -> bytes:
        """Wait for and return the state of all groups, one group or one member, as JSON. Any thread.

        Args:
            group: name of the group; None for all groups.
            member: name of the member; None for all members.
            after: the `made` of the browser's state: the answer is a newer one. A time in the future is of another
                process or forged; it is ignored.

        Raises:
            TimeoutError: there was no newer state in time, or the page stops.
        """
        with self._changed:
            self._asked_at = time.monotonic()
            if not after <= self._asked_at:
                after = 0.0
            newer_than = max(after, self._asked_at - _STATE_INTERVAL_S)
            has_state = self._changed.wait_for(
                lambda: self._made_at > newer_than or self._stopping.is_set(), timeout=_ANSWER_S
            )
            if not has_state or self._stopping.is_set():
                raise TimeoutError("the page stops" if has_state else "the state did not arrive in time")
            # The history is sent only if it has a new point.
            view = group, member, after <= self._point_at
            if view not in self._states:
                self._states[view] = json.dumps(self._view(*view)).encode()
            return self._states[view]

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                with self._open_source() as source:
                    while not self._stopping.is_set():
                        self._trouble, self._ignored = source.trouble, source.ignored
                        self._update(source.groups, is_stale=source.is_stale)
                        source.follow(_NEWS_WAIT_S)
            except PenstockError as error:
                # A broker or a permission is missing, or the topic does not exist yet.
                if str(error) != self._trouble:
                    level = logging.INFO if isinstance(error, TopicNotFoundError) else logging.WARNING
                    _log.log(level, "%s", error)
                self._trouble = str(error)
                self._update(lambda: self._groups, is_stale=True)
            except Exception:  # noqa: BLE001 - one report must not end the page or fill the log
                _log.exception("the page could not be made; it is tried again", extra=once_in(_LOG_INTERVAL_S, "page"))
            # Opening reads all reports again, so there is a delay after any failure.
            self._stopping.wait(_RETRY_DELAY_S)

    def _update(self, groups_now: Callable[[], Sequence[Group]], *, is_stale: bool) -> None:
        """Replace the groups if a point of the history is due or a browser waits for a state."""
        now = time.monotonic()
        is_due = now >= self._point_at + STEP_S or not self._made_at
        is_asked = self._asked_at > self._made_at - _STATE_INTERVAL_S and now >= self._made_at + _STATE_INTERVAL_S
        if not is_due and not is_asked:
            return
        groups = groups_now()
        with self._changed:
            if is_due:
                self._history.add(_as_silent(groups) if is_stale else groups)
                self._point_at = now
            self._groups, self._made_at, self._states = groups, now, {}
            self._head |= {"trouble": self._trouble, "ignored": dict(self._ignored), "made": now}
            self._changed.notify_all()

    def _view(self, name: str | None, member: str | None, with_history: bool) -> dict[str, Any]:
        """Return the state of a view, and note the messages that it names: only those can be read. Needs the lock."""
        if self._shows_messages:
            recent = {place: at for place, at in self._named.items() if self._made_at - at < _READABLE_S}
            self._named = recent | dict.fromkeys(shown_places(self._groups), self._made_at)
        if name is None:
            history = overview_history((group.name for group in self._groups), self._history)
            view = overview(self._groups)
        else:
            history = {"series": self._history.series(name, member)}
            group = next((group for group in self._groups if group.name == name), None)
            view = {"group": group and group_view(group, member)}
        return {**self._head, **view, **({"history": {"step": STEP_S, **history}} if with_history else {})}


def _as_silent(groups: Sequence[Group]) -> list[Group]:
    """Return the groups with all members silent: without reports, the last values make no points of a chart."""
    return [Group(group.name, [replace(member, is_silent=True) for member in group.members]) for group in groups]
