"""The hub: one thread that follows a source, keeps its history, and makes what browsers are shown.

It makes nothing that nobody looks at, each view once for all that look at it, and that once a second at most. A browser
has a slot for the newest state and one for the newest history: one that is slow misses what is in between, and one that
is gone is forgotten. Nobody waits for a browser.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, Self

from penstock.fleet.disposable_threads import TooManyError
from penstock.fleet.page.history import STEP_S, History
from penstock.fleet.page.snapshot import group_history, group_view, overview, overview_history, shown_places
from penstock.fleet.reports.group_state import Group

_log = logging.getLogger(__name__)

#: Seconds between two states that a browser gets at least; more where making them takes long.
_LEAST_S = 1.0
#: The share of the thread's time that making them may take, and the most seconds between two.
_SHARE = 0.1
_MOST_S = 2.0
#: Seconds of one wait for news, and that the end waits for the thread.
_WAIT_S = 0.5
_LEAST_WAIT_S = 0.1
_END_S = 2.0
#: Seconds for which a message may be read after the page named it last: somebody looks at it.
_NAMED_S = 120.0
#: Browsers at a time.
_MOST_BROWSERS = 64


#: What a browser is offered when nothing more comes.
END = "end"


@dataclass(frozen=True, slots=True)
class View:
    """What a browser looks at: all groups, one group, or one member of it."""

    group: str | None = None
    member: str | None = None


class Subscription:
    """A browser. The hub offers, the browser's task takes: nothing else of it is shared."""

    def __init__(self, view: View) -> None:
        self.view = view
        self._loop = asyncio.get_running_loop()
        self._news = asyncio.Event()
        # On the loop alone.
        self._slots: dict[str, bytes] = {}
        #: Whether it got a state. The hub's thread's.
        self.is_new = True

    def offer(self, kind: str, content: bytes) -> bool:
        """Put something in a slot, instead of what was not taken from it; return whether the browser is there."""
        try:
            self._loop.call_soon_threadsafe(self._put, kind, content)
        except RuntimeError:  # the loop has ended
            return False
        return True

    def _put(self, kind: str, content: bytes) -> None:
        self._slots[kind] = content
        self._news.set()

    async def take(self, wait_s: float) -> dict[str, bytes]:
        """Return what came, by kind, within so many seconds."""
        try:
            await asyncio.wait_for(self._news.wait(), wait_s)
        except TimeoutError:
            return {}
        self._news.clear()
        taken, self._slots = self._slots, {}
        return taken


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
    """Follows a source until it is stopped. A context manager; `subscribe` and `unsubscribe` are for a loop.

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
        self._subscriptions: set[Subscription] = set()
        self._is_failing = False
        # By group; replaced as a whole by the hub's thread, read by any.
        self._listening: Mapping[str, frozenset[str]] = {}
        # When a message was last named, on the monotonic clock; the same.
        self._named: Mapping[tuple[str, int, int], float] = {}

    def __enter__(self) -> Self:
        """Begin."""
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """End within seconds; a call of the client that hangs is left behind with the thread."""
        self._stopping.set()
        with self._lock:
            subscriptions = list(self._subscriptions)
        for subscription in subscriptions:
            subscription.offer(END, b"")
        self._thread.join(_END_S)

    def listening(self, group: str) -> frozenset[str]:
        """Return the members of a group that report that they listen to commands. Any thread."""
        return self._listening.get(group, frozenset())

    def names(self, topic: str, partition: int, offset: int) -> bool:
        """Tell whether the page names this message, or did a moment ago. Any thread."""
        return (topic, partition, offset) in self._named

    def subscribe(self, view: View) -> Subscription:
        """Have a browser shown a view; `TooManyError` where there are too many. On the browser's loop."""
        subscription = Subscription(view)
        with self._lock:
            if len(self._subscriptions) >= _MOST_BROWSERS:
                raise TooManyError("too many look at the page; try again later")
            self._subscriptions.add(subscription)
        return subscription

    def unsubscribe(self, subscription: Subscription) -> None:
        """Forget a browser."""
        with self._lock:
            self._subscriptions.discard(subscription)

    def _run(self) -> None:
        next_point = next_state = 0.0
        try:
            while not self._stopping.is_set():
                # Not past the time at which somebody is to be shown something.
                wait_s = min(_WAIT_S, max(_LEAST_WAIT_S, next_state - time.monotonic()))
                self._guarded(partial(self._source.follow, wait_s if self._subscriptions else _WAIT_S))
                now = time.monotonic()
                is_point = now >= next_point
                if is_point:
                    next_point = now + STEP_S
                    self._guarded(self._note)
                shown = self._due(everybody=now >= next_state)
                if shown:
                    begun = time.thread_time()
                    self._guarded(partial(self._show, shown, with_history=is_point))
                    pause = (time.thread_time() - begun) / _SHARE
                    next_state = max(next_state, now + min(_MOST_S, max(_LEAST_S, pause)) - 0.05)
        finally:
            self._source.close()

    def _note(self) -> None:
        groups = self._source.groups()
        self._history.add(groups)
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
            self._stopping.wait(_WAIT_S)
        else:
            self._is_failing = False

    def _due(self, *, everybody: bool) -> list[Subscription]:
        with self._lock:
            return [subscription for subscription in self._subscriptions if everybody or subscription.is_new]

    def _show(self, browsers: Sequence[Subscription], *, with_history: bool) -> None:
        """Make what these browsers look at, and offer it to them."""
        groups = self._source.groups()
        if self._shows_messages:
            now = time.monotonic()
            recent = {place: at for place, at in self._named.items() if now - at < _NAMED_S}
            self._named = recent | dict.fromkeys(shown_places(groups), now)
        made: dict[tuple[str, View], bytes] = {}
        for browser in browsers:
            kinds = ("state", "history") if with_history or browser.is_new else ("state",)
            browser.is_new = False
            for kind in kinds:
                content = made.get((kind, browser.view))
                if content is None:
                    make = self._state if kind == "state" else self._past
                    content = made[kind, browser.view] = json.dumps(make(browser.view, groups)).encode()
                if not browser.offer(kind, content):
                    self.unsubscribe(browser)

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
