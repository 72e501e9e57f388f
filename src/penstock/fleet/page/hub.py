"""The hub: one thread that follows a source, keeps its history, and makes what browsers are shown.

It makes nothing that nobody looks at, each view once for all that look at it, and that once a second at most. A browser
asks for the state after the one that it has, and gets it when it is made: one that is slow misses what is in between,
and one that is gone asks for nothing. Nobody waits for a browser.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, Self

from penstock.fleet.disposable_threads import TooManyError
from penstock.fleet.page.history import STEP_S, History
from penstock.fleet.page.snapshot import group_history, group_view, overview, overview_history, shown_places
from penstock.fleet.reports.group_state import Group

_log = logging.getLogger(__name__)

#: Seconds between two states that a browser gets at least; more where making them takes long.
_MIN_INTERVAL_S = 1.0
#: The share of the thread's time that making them may take, and the most seconds between two.
_SHARE = 0.1
_MAX_INTERVAL_S = 2.0
#: Seconds of one wait for news, and that the end waits for the thread.
_NEWS_WAIT_S = 0.5
_MIN_NEWS_WAIT_S = 0.1
_JOIN_S = 2.0
#: Seconds for which a message may be read after the page named it last: somebody looks at it.
_READABLE_S = 120.0
#: Browsers that wait at a time, and seconds that one does at most.
_MOST_BROWSERS = 64
_ANSWER_S = 10.0


@dataclass(frozen=True, slots=True)
class View:
    """What a browser looks at: all groups, one group, or one member of it."""

    group: str | None = None
    member: str | None = None


@dataclass(frozen=True, slots=True)
class _Asked:
    """What a browser waits for: a view, newer than what it has."""

    view: View
    #: When that was made, by the hub's own count; 0 where it has nothing.
    after: float
    loop: asyncio.AbstractEventLoop
    answer: asyncio.Future[bytes | None] = field(repr=False)

    def give(self, content: bytes | None) -> None:
        """Hand over what was made, None where nothing comes any more; the browser may have gone meanwhile."""
        with suppress(RuntimeError):  # its loop has ended
            self.loop.call_soon_threadsafe(lambda: None if self.answer.done() else self.answer.set_result(content))


class Source(Protocol):
    """Where the page's groups come from. For the hub's thread; nothing here ends it: `trouble` says what is wrong."""

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


class Hub:
    """Follows a source until it is stopped. A context manager; `state` is for loops.

    Args:
        source: where groups come from; it is closed at the end.
        of: what the page calls it.
        shows_messages: whether the page shows messages that it names, and stacks.
    """

    def __init__(self, source: Source, *, of: str, shows_messages: bool = False) -> None:
        self._source = source
        self._shows_messages = shows_messages
        self._told = {"of": of, "messages": shows_messages}
        self._history = History()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="penstock-page", daemon=True)
        self._lock = threading.Lock()
        # Written under the lock.
        self._asked: list[_Asked] = []
        self._is_failing = False
        # When a point was added last; the hub's thread's.
        self._noted_at = 0.0
        # By group; replaced as a whole by the hub's thread, read by any.
        self._listening: Mapping[str, frozenset[str]] = {}
        # When a message was last named, on the monotonic clock; the same.
        self._named: Mapping[tuple[str, int, int], float] = {}

    def __enter__(self) -> Self:
        """Begin."""
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """End within seconds; a call of the client that hangs is abandoned with the thread."""
        self._stopping.set()
        with self._lock:
            for browser in self._asked:
                browser.give(None)
        self._thread.join(_JOIN_S)

    def listening(self, group: str) -> frozenset[str]:
        """Return the members of a group that report that they listen to commands. Any thread."""
        return self._listening.get(group, frozenset())

    def names(self, topic: str, partition: int, offset: int) -> bool:
        """Tell whether the page names this message, or did a moment ago. Any thread."""
        return (topic, partition, offset) in self._named

    async def state(self, view: View, after: float = 0.0) -> bytes:
        """Return a view as JSON, once there is a newer one than that of `after`, which a state has as `made`.

        Raises:
            TooManyError: too many browsers wait.
            TimeoutError: it did not come in time.
        """
        loop = asyncio.get_running_loop()
        asked = _Asked(view, after, loop, loop.create_future())
        with self._lock:
            if len(self._asked) >= _MOST_BROWSERS:
                raise TooManyError("too many look at the page; try again later")
            self._asked.append(asked)
        try:
            content = await asyncio.wait_for(asked.answer, _ANSWER_S)
        finally:
            with self._lock:
                self._asked.remove(asked)
        if content is None:
            raise TimeoutError("the page ends")
        return content

    def _run(self) -> None:
        next_point = next_state = 0.0
        try:
            while not self._stopping.is_set():
                # Not past the time at which somebody is to be shown something.
                wait_s = min(_NEWS_WAIT_S, max(_MIN_NEWS_WAIT_S, next_state - time.monotonic()))
                self._guarded(partial(self._source.follow, wait_s if self._asked else _NEWS_WAIT_S))
                now = time.monotonic()
                if now >= next_point:
                    next_point = now + STEP_S
                    self._guarded(partial(self._note, now))
                with self._lock:
                    asked = [browser for browser in self._asked if now >= next_state or browser.after == 0.0]
                if asked:
                    begun = time.thread_time()
                    self._guarded(partial(self._show, asked, now))
                    pause = (time.thread_time() - begun) / _SHARE
                    next_state = max(next_state, now + min(_MAX_INTERVAL_S, max(_MIN_INTERVAL_S, pause)) - 0.05)
        finally:
            self._source.close()

    def _note(self, now: float) -> None:
        groups = self._source.groups()
        self._history.add(groups)
        self._noted_at = now
        self._listening = {
            group.name: frozenset(
                member.report.member for member in group.members if member.report.commands and not member.is_silent
            )
            for group in groups
        }

    def _guarded(self, step: Callable[[], None]) -> None:
        """Do a step; what fails in it is logged once until one succeeds."""
        try:
            step()
        except Exception:  # noqa: BLE001 - a page must not end, nor fill the log, over one report
            if not self._is_failing:
                _log.exception("the page could not be made; it is tried on")
            self._is_failing = True
            self._stopping.wait(_NEWS_WAIT_S)
        else:
            self._is_failing = False

    def _show(self, asked: Sequence[_Asked], now: float) -> None:
        """Make what these browsers look at, and hand it over."""
        groups = self._source.groups()
        if self._shows_messages:
            recent = {place: at for place, at in self._named.items() if now - at < _READABLE_S}
            self._named = recent | dict.fromkeys(shown_places(groups), now)
        made: dict[tuple[View, bool], bytes] = {}
        for browser in asked:
            # A history has a point more only now and then.
            with_history = browser.after <= self._noted_at
            content = made.get((browser.view, with_history))
            if content is None:
                state = self._state(browser.view, groups) | {"made": now}
                if with_history:
                    state["history"] = self._past(browser.view, groups)
                content = made[browser.view, with_history] = json.dumps(state).encode()
            browser.give(content)

    def _state(self, view: View, groups: Sequence[Group]) -> dict[str, Any]:
        state = {
            **self._told,
            "at": round(time.time() * 1000),
            "trouble": self._source.trouble,
            "ignored": dict(self._source.ignored),
        }
        if view.group is None:
            return {**state, **overview(groups)}
        found = next((group for group in groups if group.name == view.group), None)
        if found is None:
            return {**state, "group": None}
        shown = group_view(found, self._history, view.member, with_stacks=self._shows_messages)
        return {**state, "group": shown}

    def _past(self, view: View, groups: Sequence[Group]) -> dict[str, Any]:
        if view.group is None:
            return {"step": STEP_S, **overview_history((group.name for group in groups), self._history)}
        return {"step": STEP_S, **group_history(view.group, self._history, view.member)}
