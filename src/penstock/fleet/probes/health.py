"""Whether a process lives and whether it is ready, with reasons: what `/healthz` and `/readyz` answer.

A process that does not live is worth a restart. One that is not ready is not: its broker may be gone, or its group may
give it nothing. Reasons name topics, offsets, handlers and threads, never keys and values.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from penstock import options as check
from penstock.consumer import ConsumerStatistics, Explanation
from penstock.description import coordinator_description
from penstock.errors import PenstockError
from penstock.running import RunningApp
from penstock.spark_sink.progress import SinkState
from penstock.transactions import Coordinator

#: States in which a message does not wait for what somebody configured: a retry's time, a rate, a key that is held.
_WORK = frozenset({"idle", "in handler", "queued", "behind a call", "publishing", "dead letter"})


@dataclass(frozen=True, slots=True)
class HealthLimits:
    """What is too long.

    Attributes:
        handler: seconds that a message may be in a handler, or the event loop blocked, before the process counts as
            hung.
        moving: seconds in which something must be done where there is something to do.

    Raises:
        ConfigurationError: one is no time.
    """

    handler: float = 300.0
    moving: float = 60.0

    def __post_init__(self) -> None:
        check.seconds("handler limit", self.handler)
        check.seconds("moving limit", self.moving)


class Health:
    """The process of an app, as probes judge it and its page shows it. Any thread."""

    def __init__(self, name: str, limits: HealthLimits, clock: Callable[[], float] = time.monotonic) -> None:
        self._name = name
        self._limits = limits
        self._clock = clock
        #: The app; None until it has started.
        self.running: RunningApp | None = None
        # Guards what was done and when that changed last: probes and the page's thread note it.
        self._lock = threading.Lock()
        self._done = -1
        self._moved_at = clock()

    def alive(self) -> list[str]:
        """Return why it does not go on, so that a restart helps: a thread or a handler hangs. One that starts does."""
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
        """Return why it does not do its work: it has no partitions, does not get on with them, or a sink is down."""
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
            reasons += self._not_moving(running.explain(), self._still_s(running))
        return reasons

    def trouble(self) -> str | None:
        """Return what the page says above all else, or None."""
        if self.running is None:
            return "the app is starting"
        return "the app is stopping" if self.running.is_stopping else None

    def description(self) -> Mapping[str, Any] | None:
        """Return its description; None until it has started.

        The page asks for one every few seconds, also where nobody looks: so `ready` knows since when nothing was done.
        """
        if self.running is None:
            return None
        if self.running.has_consumer:
            self._still_s(self.running)
        return self.running.explanation(self._name)

    def _still_s(self, running: RunningApp) -> float:
        """Return for how many seconds nothing was done, as far as was looked, though there was something to do."""
        found = running.statistics()
        done = _done(found)
        with self._lock:
            # What falls counts too: a partition or a worker that is gone takes its count along.
            if done != self._done or not _has_work(found):
                self._done, self._moved_at = done, self._clock()
            return self._clock() - self._moved_at

    def _not_moving(self, partitions: list[Explanation], still_s: float) -> list[str]:
        assigned = [partition for partition in partitions if partition.partition >= 0]
        if not assigned:
            return [str(partition) for partition in partitions] or ["no partition is assigned"]
        if all(partition.trouble is not None for partition in assigned):
            return [str(partition) for partition in assigned]
        stuck = [str(partition) for partition in assigned if _is_stuck(partition)]
        if not stuck or still_s <= self._limits.moving:
            return []
        return [f"nothing was done for {still_s:.0f} s, though there is work", *stuck]


class CoordinatorHealth:
    """The process of `penstock coordinator`, likewise."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator

    def alive(self) -> list[str]:
        """Return why it has ended: it does by itself where it cannot go on."""
        try:
            has_ended = self._coordinator.wait(0)
        except PenstockError as error:
            return [str(error)]
        return ["the coordinator has ended"] if has_ended else []

    def ready(self) -> list[str]:
        """Return why it has no partitions yet; what single transactions wait for does not count."""
        ended = self.alive()
        if ended or self._coordinator.statistics().partitions:
            return ended
        return ["no partition is taken over", *self._coordinator.waits()]

    def trouble(self) -> str | None:
        """Return None: what its page shows says it all."""
        return None

    def description(self) -> Mapping[str, Any]:
        """Return its description."""
        coordinator = self._coordinator
        return {"coordinator": coordinator_description(coordinator), "commands": coordinator.hears_commands}


def _done(found: ConsumerStatistics) -> int:
    return found.handled + found.restored + found.filtered + found.dropped + found.dead_letters + found.retry_topic


def _has_work(found: ConsumerStatistics) -> bool:
    return found.in_flight > 0 or any(partition.lag for partition in found.partitions)


def _is_stuck(explanation: Explanation) -> bool:
    # What the app itself has paused has no lag.
    return explanation.trouble is not None or (bool(explanation.lag) and explanation.state in _WORK)
