"""The hub: one thread that follows a source and keeps its history, and the states that browsers ask for.

A source that cannot be had, as while its topic or its broker is not there, is tried for again; what was known last is
shown meanwhile, with the reason.

A state is made only where a browser asks, each view once for all that look at it, and that once a second at most. A
browser asks for the state after the one that it has: one that is slow misses what is in between, and one that is gone
asks for nothing. The hub's thread waits for no browser.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, Self

from penstock.clients.ration import once_in, rationed
from penstock.errors import PenstockError, TopicNotFoundError
from penstock.fleet.page.history import STEP_S, History
from penstock.fleet.page.snapshot import group_view, overview, overview_history, shown_places
from penstock.fleet.reports.group_state import Group

_log = rationed(__name__)

#: Seconds between two states that a browser gets, at least.
_STATE_INTERVAL_S = 1.0
#: Seconds of one wait for news, that a browser waits for a state, and that the end waits for the thread.
_NEWS_WAIT_S = 0.25
_ANSWER_S = 10.0
_JOIN_S = 2.0
#: Seconds between two tries to have the source.
_RETRY_DELAY_S = 1.0
#: Seconds between two lines of the log that say that states cannot be made.
_LOG_INTERVAL_S = 60.0
#: Seconds for which a message may be read after the page named it last: somebody looks at it.
_READABLE_S = 120.0


class Source(Protocol):
    """Where the page's groups come from. For the hub's thread.

    What it raises ends it, and it is opened again.
    """

    @property
    def trouble(self) -> str | None:
        """Why nothing newer is known, or None."""

    @property
    def ignored(self) -> Mapping[str, int]:
        """Records that were passed over, by why."""

    def follow(self, timeout: float) -> object:
        """Wait for news, at most `timeout` seconds."""

    def groups(self) -> Sequence[Group]:
        """Return all groups by name, at this moment."""


class Hub:
    """Follows a source until it is stopped. A context manager.

    Args:
        open_source: returns where groups come from; it is entered on the hub's thread.
        of: what the page calls it.
        shows_messages: whether the page shows messages that it names.
        actions: the actions that the page offers.
    """

    def __init__(
        self,
        open_source: Callable[[], AbstractContextManager[Source]],
        of: str,
        *,
        shows_messages: bool = False,
        actions: Sequence[str] = (),
    ) -> None:
        self._open_source = open_source
        self._shows_messages = shows_messages
        self._thread = threading.Thread(target=self._run, name="penstock-page", daemon=True)
        self._stopping = threading.Event()
        # Guards all that follows; notified when there is something newer, and at the end. The hub's thread replaces
        # groups and adds to the history, browsers' threads make states of both and say that they look.
        self._changed = threading.Condition()
        self._groups: Sequence[Group] = ()
        self._head: dict[str, Any] = {"of": of, "messages": shows_messages, "actions": list(actions)}
        # When groups were taken and a point was added last, and a browser asked last, by the monotonic clock.
        self._made_at = self._noted_at = self._asked_at = 0.0
        self._history = History()
        # The states of these groups that were asked for, by group, member, and whether they have the history.
        self._states: dict[tuple[str | None, str | None, bool], bytes] = {}
        # When a message was last named.
        self._named: dict[tuple[str, int, int], float] = {}
        # The hub's thread's alone: what the source said of itself last.
        self._trouble: str | None = None
        self._ignored: Mapping[str, int] = {}

    def __enter__(self) -> Self:
        """Begin."""
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """End within seconds; a call of the client that hangs is abandoned with the thread."""
        self._stopping.set()
        with self._changed:
            self._changed.notify_all()
        self._thread.join(_JOIN_S)

    def listening(self, group: str) -> frozenset[str]:
        """Return the members of a group that report that they listen to commands. Any thread."""
        with self._changed:
            members = [member for found in self._groups if found.name == group for member in found.members]
        return frozenset(it.report.member for it in members if it.report.commands and not it.is_silent)

    def names(self, topic: str, partition: int, offset: int) -> bool:
        """Tell whether the page names this message, or did a moment ago. Any thread."""
        with self._changed:
            return (topic, partition, offset) in self._named

    def state(self, group: str | None = None, member: str | None = None, after: float = 0.0) -> bytes:
        """Return the state of all groups, a group or one of its members, as JSON. Any thread, which waits for it.

        Args:
            group: name of the group; None for all groups.
            member: name of the member, where the group is to be seen without the others.
            after: the `made` of the state that the browser has: the answer is a newer one. A time to come is of another
                process, or made up: the browser has nothing.

        Raises:
            TimeoutError: it did not come in time, or the page ends.
        """
        with self._changed:
            self._asked_at = time.monotonic()
            if not after <= self._asked_at:
                after = 0.0
            newer_than = max(after, self._asked_at - _STATE_INTERVAL_S)
            is_there = self._changed.wait_for(
                lambda: self._made_at > newer_than or self._stopping.is_set(), timeout=_ANSWER_S
            )
            if not is_there or self._stopping.is_set():
                raise TimeoutError("the page ends" if is_there else "the state did not come in time")
            # A history has a point more only now and then.
            view = group, member, after <= self._noted_at
            if view not in self._states:
                self._states[view] = json.dumps(self._shown(*view)).encode()
            return self._states[view]

    def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                with self._open_source() as source:
                    while not self._stopping.is_set():
                        self._trouble, self._ignored = source.trouble, source.ignored
                        self._take(source.groups)
                        source.follow(_NEWS_WAIT_S)
            except PenstockError as error:
                # A broker or a right is gone, or the topic is not there yet.
                if str(error) != self._trouble:
                    level = logging.INFO if isinstance(error, TopicNotFoundError) else logging.WARNING
                    _log.log(level, "%s", error)
                self._trouble = str(error)
                self._take(lambda: self._groups)
            except Exception:  # noqa: BLE001 - a page must not end, nor fill the log, over one report
                _log.exception("the page could not be made; it is tried on", extra=once_in(_LOG_INTERVAL_S, "page"))
            # Opening reads all reports again: not more often than that, whatever failed.
            self._stopping.wait(_RETRY_DELAY_S)

    def _take(self, groups_now: Callable[[], Sequence[Group]]) -> None:
        """Take the groups as they are, where a point of the history is due or somebody waits for a state."""
        now = time.monotonic()
        is_due = now >= self._noted_at + STEP_S or not self._made_at
        is_asked = self._asked_at > self._made_at - _STATE_INTERVAL_S and now >= self._made_at + _STATE_INTERVAL_S
        if not is_due and not is_asked:
            return
        groups = groups_now()
        with self._changed:
            if is_due:
                self._history.add(groups)
                self._noted_at = now
            self._groups, self._made_at, self._states = groups, now, {}
            self._head |= {"trouble": self._trouble, "ignored": dict(self._ignored), "made": now}
            self._changed.notify_all()

    def _shown(self, name: str | None, member: str | None, with_history: bool) -> dict[str, Any]:
        """Return a state; with the lock. It is what names messages: so only what somebody was shown can be read."""
        if self._shows_messages:
            recent = {place: at for place, at in self._named.items() if self._made_at - at < _READABLE_S}
            self._named = recent | dict.fromkeys(shown_places(self._groups), self._made_at)
        if name is None:
            past = overview_history((it.name for it in self._groups), self._history)
            shown = overview(self._groups)
        else:
            past = {"series": self._history.series(name, member)}
            group = next((group for group in self._groups if group.name == name), None)
            shown = {"group": group and group_view(group, member)}
        return {**self._head, **shown, **({"history": {"step": STEP_S, **past}} if with_history else {})}
