"""Liveness and readiness of a process, with reasons: the answers of `/healthz` and `/readyz`.

A process that is not alive should be restarted. A process that is not ready should not: its broker may be away, or its
group may assign no partition to it. Reasons name topics, offsets, handlers and threads, never keys and values.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock import options as check
from penstock.consumer import ConsumerStatistics, Explanation
from penstock.description import process_of_coordinator
from penstock.errors import PenstockError
from penstock.running import RunningApp
from penstock.spark_sink.progress import SinkState
from penstock.transactions import Coordinator

#: The states in which a message should move. Not among them are configured waits: a retry time, a rate, a held key.
_WORK = frozenset({"idle", "in handler", "queued", "behind a call", "publishing", "dead letter"})


@dataclass(frozen=True, slots=True)
class HealthLimits:
    """The time limits of the probes.

    Attributes:
        handler: seconds that a message may stay in a handler, or the event loop be blocked. Longer means hung.
        moving: seconds within which a message must be done if there is work.

    Raises:
        ConfigurationError: a limit is no time in seconds.
    """

    handler: float = 300.0
    moving: float = 60.0

    def __post_init__(self) -> None:
        check.seconds("handler limit", self.handler)
        check.seconds("moving limit", self.moving)


class Health:
    """The state of an app's process, for its probes and its page. Any thread."""

    def __init__(self, name: str, limits: HealthLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self._name = name
        self._limits = limits
        self._clock = clock
        #: The app; None until it has started.
        self.running: RunningApp | None = None
        # The lock of the count of done messages and the time of its last change. Probes and the page's thread write it.
        self._lock = threading.Lock()
        self._done = -1
        self._moved_at = clock()

    def alive(self) -> list[str]:
        """Return the reasons why it hangs, which a restart fixes: threads and handlers. An app that starts is alive."""
        live = None if self.running is None else self.running.liveness()
        reasons: list[str] = []
        if live is None:
            return reasons
        if live.turned_s is not None and live.turned_s > live.turn_limit_s:
            reasons.append(f"the poll thread has not come round for {live.turned_s:.1f} s")
        if live.longest is not None and live.longest.seconds > self._limits.handler:
            reasons.append(f"{live.longest}; the limit is {self._limits.handler:g} s")
        if live.loop_blocked_s > self._limits.handler:
            reasons.append(f"the event loop has been blocked for {live.loop_blocked_s:.1f} s")
        return reasons

    def ready(self) -> list[str]:
        """Return the reasons why it does not work: it has no partitions, makes no progress, or a sink is down."""
        running = self.running
        trouble = self.trouble()
        if running is None or trouble is not None:
            return [trouble or "the app is starting"]
        reasons = [
            f"sink {sink.name} is {sink.state.value}"
            for sink in running.sinks()
            if sink.state not in (SinkState.RUNNING, SinkState.ENDED, SinkState.STANDBY)
        ]
        if running.has_consumer:
            reasons += self._not_moving(running, running.explain())
        return reasons

    def trouble(self) -> str | None:
        """Return the text of the page's banner, or None."""
        if self.running is None:
            return "the app is starting"
        return "the app is stopping" if self.running.is_stopping else None

    def description(self) -> Mapping[str, Any] | None:
        """Return its description; None until it has started.

        The page's thread calls it every few seconds, even without a browser. So `ready` knows the time of the last
        progress.
        """
        if self.running is None:
            return None
        description = self.running.explanation(self._name)
        if self.running.has_consumer:
            parts = [part for part in description["partitions"] if part["partition"] >= 0]
            self._still_s(
                self.running, is_stuck=any(_is_stuck(part["trouble"], part["lag"], part["state"]) for part in parts)
            )
        return description

    def stacks(self) -> Mapping[str, Sequence[str]]:
        """Return the stacks of the calls that block partitions, by worker."""
        stacks: Mapping[str, Sequence[str]] = {}
        return stacks if self.running is None else self.running.explanation(self._name, with_stacks=True)["stacks"]

    def _still_s(self, running: RunningApp, *, is_stuck: bool) -> float:
        """Return the seconds without progress, as seen by calls of this method, while a partition should move."""
        done = _done(running.statistics())
        with self._lock:
            # A lower count is a change too: a partition or a worker that ended no longer contributes.
            if done != self._done or not is_stuck:
                self._done, self._moved_at = done, self._clock()
            return self._clock() - self._moved_at

    def _not_moving(self, running: RunningApp, partitions: list[Explanation]) -> list[str]:
        assigned = [partition for partition in partitions if partition.partition >= 0]
        if not assigned:
            return [str(partition) for partition in partitions] or ["no partition is assigned"]
        if all(partition.trouble is not None for partition in assigned):
            return [str(partition) for partition in assigned]
        stuck = [str(part) for part in assigned if _is_stuck(part.trouble, part.lag, part.state)]
        still_s = self._still_s(running, is_stuck=bool(stuck))
        if still_s <= self._limits.moving:
            return []
        return [f"no message was done for {still_s:.0f} s, though there is work", *stuck]


class CoordinatorHealth:
    """The state of the process of `penstock coordinator`, for its probes and its page."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator

    def alive(self) -> list[str]:
        """Return the reason why it has ended: it ends by itself if it cannot go on."""
        try:
            has_ended = self._coordinator.wait(0)
        except PenstockError as error:
            return [str(error)]
        return ["the coordinator has ended"] if has_ended else []

    def ready(self) -> list[str]:
        """Return the reasons why it has no partitions yet; waits of single transactions do not count."""
        ended = self.alive()
        if ended or self._coordinator.statistics().partitions:
            return ended
        return ["no partition is taken over", *self._coordinator.waits()]

    def trouble(self) -> str | None:
        """Return None: a coordinator's page has no banner."""
        return None

    def description(self) -> Mapping[str, Any]:
        """Return its description."""
        return process_of_coordinator(self._coordinator)


def _done(counts: ConsumerStatistics) -> int:
    return sum(
        (counts.handled, counts.restored, counts.filtered, counts.dropped, counts.dead_letters, counts.retry_topic)
    )


def _is_stuck(trouble: str | None, lag: int | None, state: str) -> bool:
    # A partition that the app itself paused has no lag.
    return trouble is not None or (bool(lag) and state in _WORK)
