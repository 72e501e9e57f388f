"""The relay of one shard of a store that is not in Kafka: what publishes it, on two paths, without ever waiting.

The main path publishes all that is well, in as few Kafka transactions as it can. What was refused is tried apart, by a
producer of its own (`<id>.q`): see `quarantine`. Nothing is on both paths, and both write what they publish into the
same done log. After a doubt of either, nothing that it had is touched until that log was read, its writer shut out:

- a doubt of the main path ends both; the next one shuts both out, reads, and all that is not in the log is free;
- a doubt of a trial ends that path alone: what it had waits until its next producer has read the log.

Calls of the Kafka client are made by disposable threads; the store's thread calls `step` again and again.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from confluent_kafka import KafkaException

from penstock.clients.bounded_calls import LeftBehind, NotAnsweredError
from penstock.clients.kafka_errors import reason
from penstock.clients.transactional.pace import Pace
from penstock.errors import BrokerConnectionError
from penstock.transactions.rationed_log import RationedLog
from penstock.transactions.stores.relay.backlog import Backlog
from penstock.transactions.stores.relay.outbound.bounded_outbound import BoundedOutbound
from penstock.transactions.stores.relay.outbound.outbound import InDoubtError, Outbound
from penstock.transactions.stores.relay.publishable import Outcome, Publishable
from penstock.transactions.stores.relay.quarantine import Quarantine

_log = logging.getLogger("penstock.transactions")

#: Seconds between two tries to open.
_AGAIN_S = 0.5
#: Seconds in which nothing was refused, after which the producer for trials is closed.
_IDLE_S = 30.0
_CLOSE_S = 2.0
#: What a call may raise when brokers are away: it is tried again.
_DOUBTS = (InDoubtError, NotAnsweredError, BrokerConnectionError, KafkaException)


class MakeOutbound(Protocol):
    """Makes what publishes; called by disposable threads."""

    def __call__(self, transactional_id: str, *, apart: bool) -> Outbound:
        """Return one, not open: `apart` tells whether it is for trials."""


@dataclass(slots=True)
class _Path:
    """One of the two paths."""

    bound: BoundedOutbound
    is_open: bool = False
    #: What is under way, or in doubt.
    entries: Sequence[Publishable] = ()
    #: Nothing that it writes into the done log, and is not settled, stands below.
    floor: int | None = None
    open_at: float = 0.0
    #: What is called with the result of the call under way.
    take: Callable[[Any], None] = field(default=lambda _: None)

    @property
    def names(self) -> list[str]:
        return [entry.transaction_id for entry in self.entries]

    def clear(self) -> None:
        self.entries, self.floor = (), None


class Relay:
    """Publishes one shard. Used by one thread.

    `wake` is called from other threads when `step` has something to do; `left` counts those that are left behind.
    """

    def __init__(
        self,
        backlog: Backlog,
        transactional_id: str,
        make: MakeOutbound,
        left: LeftBehind,
        wake: Callable[[], object],
        *,
        pace: Pace | None = None,
    ) -> None:
        trial = f"{transactional_id}.q"
        self._backlog = backlog
        self._name = transactional_id
        self._trial_name = trial
        main = BoundedOutbound(lambda: make(transactional_id, apart=False), transactional_id, left, wake, pace)
        self._main = _Path(main)
        self._trial = _Path(BoundedOutbound(lambda: make(trial, apart=True), trial, left, wake, pace))
        self._quarantine = Quarantine()
        self._refused_at = 0.0
        # Whether the owner of the trials may be another one.
        self._trial_unknown = True
        # Below it, all of the done log is settled, save for what a path has under way.
        self._high = 0
        self._forgotten = 0
        self._said: set[str] = set()
        self._ration = RationedLog()
        #: Kafka transactions committed; doubts, after which the producer was replaced.
        self.groups = self.recoveries = 0

    @property
    def is_open(self) -> bool:
        """Whether it can publish."""
        return self._main.is_open

    @property
    def is_busy(self) -> bool:
        """Whether something is under way."""
        return self._main.bound.is_busy or self._trial.bound.is_busy

    @property
    def has_main_busy(self) -> bool:
        """Whether the main path takes nothing now."""
        return self._main.bound.is_busy or not self._main.is_open

    def slow_call(self) -> tuple[str, float]:
        """Return the call that has not gone on for longest, and for how many seconds; an empty name: all do."""
        return max(self._main.bound.slow_call(), self._trial.bound.slow_call(), key=lambda one: one[1])

    def step(self, *, takes: bool = True) -> bool:
        """Go on as far as that goes without waiting, with something new only if it `takes`; tell whether it went on."""
        done = False
        while self._step_once(takes=takes):
            done = True
        return done

    def _step_once(self, *, takes: bool) -> bool:
        if self._end_call(self._main, self._main_doubt) | self._end_call(self._trial, self._trial_doubt):
            return True
        if not takes:
            return False
        return self._begin_main() | self._begin_trial()

    def _end_call(self, path: _Path, doubt: Callable[[Exception], None]) -> bool:
        try:
            call = path.bound.ended()
            if call is None:
                return False
            result = call.result()
        except _DOUBTS as error:
            doubt(error)
            return True
        path.take(result)
        return True

    def _begin_main(self) -> bool:
        main, now = self._main, time.monotonic()
        if main.bound.is_busy:
            return False
        if not main.is_open:
            if now < main.open_at or not self._backlog.may_open():
                return False
            self._open(main, self._main_opened, (self._trial_name,) if self._trial_unknown else ())
            return True
        entries, stopped = self._quarantine.admit(self._backlog.take(), now)
        if stopped:
            self._backlog.hold(stopped)
        if not entries:
            return bool(stopped)
        visible = self._backlog.wants_visible(entries)
        self._start(main, entries, self._main_published, visible=visible)
        return True

    def _open(self, path: _Path, take: Callable[[Any], None], shut_out: Sequence[str] = ()) -> None:
        def work(outbound: Outbound) -> tuple[frozenset[str], int]:
            return outbound.open(shut_out), outbound.known_to

        path.take = take
        path.bound.start("open", work)

    def _start(
        self, path: _Path, entries: Sequence[Publishable], take: Callable[[Any], None], *, visible: bool
    ) -> None:
        path.entries, path.floor, path.take = entries, self._high, take

        def work(outbound: Outbound) -> tuple[Outcome, int, int]:
            before = outbound.groups
            outcome = outbound.publish(entries, until_visible=visible)
            return outcome, outbound.known_to, outbound.groups - before

        path.bound.start("publication", work)

    def _main_opened(self, result: tuple[frozenset[str], int]) -> None:
        self._take_in_found(result, self._main, self._trial)
        self._main.is_open, self._trial_unknown = True, False

    def _take_in_found(self, result: tuple[frozenset[str], int], *paths: _Path) -> None:
        """Take in what the done log has: that was published, and what else the paths had is free."""
        found, known_to = result
        if found:
            self._backlog.published(sorted(found))
            self._quarantine.remove(found)
        for path in paths:
            left = [name for name in path.names if name not in found]
            path.clear()
            if path is self._main:
                self._backlog.give_back(left)
            else:
                self._quarantine.give_back(left)
                self._backlog.put_back(left)
        self._high = max(self._high, known_to)

    def _main_published(self, result: tuple[Outcome, int, int]) -> None:
        main, (outcome, known_to, groups) = self._main, result
        now = time.monotonic()
        stopped = self._quarantine.main_ended(main.entries, outcome, now)
        self._settle(outcome, known_to, groups)
        main.clear()
        if outcome.is_spent:
            # Both paths open together: the done log is read once for what either has.
            self._main.is_open, self._main.open_at = False, now
            self._leave_both()
        if stopped:
            self._refused_at = now
            self._say(outcome)
            self._backlog.hold(stopped)
        self._backlog.give_back([name for name in outcome.held if name not in stopped])

    def _settle(self, outcome: Outcome, known_to: int, groups: int) -> None:
        self.groups += groups
        if outcome.published:
            self._backlog.published(outcome.published)
        self._high = max(self._high, known_to)

    def _main_doubt(self, error: Exception) -> None:
        self._doubt(self._main, error)
        # What the trials have now is judged by the same reading of the done log.
        self._leave_both()

    def _leave_both(self) -> None:
        self._main.bound.leave()
        if self._trial.is_open or self._trial.bound.is_busy or self._trial.entries:
            self._trial.bound.leave()
            self._trial.is_open = False
            self._trial_unknown = True

    def _doubt(self, path: _Path, error: Exception) -> None:
        now = time.monotonic()
        self.recoveries += path.is_open
        path.is_open, path.open_at = False, now + _AGAIN_S
        if isinstance(error, InDoubtError):
            self._quarantine.blame(error.faults, now)
            self._refused_at = now
        text = reason(error) if isinstance(error, KafkaException) else error
        self._ration.warn(str(text), "%s: %s; the done log tells what was published", self._name, text)

    def _trial_doubt(self, error: Exception) -> None:
        self._doubt(self._trial, error)
        self._trial.bound.leave()

    def _begin_trial(self) -> bool:
        trial, now = self._trial, time.monotonic()
        if trial.bound.is_busy or not self._main.is_open:
            return False
        if not trial.is_open:
            if now < trial.open_at or not (trial.entries or self._is_due(now)):
                return False
            self._open(trial, self._trial_opened)
            return True
        if self._quarantine.is_empty:
            if now - self._refused_at > _IDLE_S:
                trial.bound.leave()
                trial.is_open = False
            return False
        return self._try(now)

    def _is_due(self, now: float) -> bool:
        return not self._quarantine.is_empty and self._quarantine.wait_s(now) <= 0

    def _trial_opened(self, result: tuple[frozenset[str], int]) -> None:
        self._take_in_found(result, self._trial)
        self._trial.is_open = True

    def _try(self, now: float) -> bool:
        if not self._is_due(now):
            return False
        names = self._quarantine.next_trial(now)
        if not names:
            return False
        try:
            found = self._backlog.take_held(names)
        except BaseException:
            self._quarantine.give_back(names)
            raise
        gone = [name for name in names if name in found and found[name] is None]
        self._quarantine.remove(gone)
        entries = [entry for name in names if (entry := found.get(name)) is not None]
        self._quarantine.give_back([name for name in names if name not in found])
        if entries:
            self._start(self._trial, entries, self._trial_published, visible=self._backlog.wants_visible(entries))
        return bool(entries or gone)

    def _trial_published(self, result: tuple[Outcome, int, int]) -> None:
        outcome, known_to, groups = result
        now = time.monotonic()
        reasons = self._quarantine.tried(outcome, now)
        self._settle(outcome, known_to, groups)
        published = set(outcome.published)
        left = [name for name in self._trial.names if name not in published]
        self._trial.clear()
        self._trial.is_open = not outcome.is_spent
        if left:
            self._refused_at = now
            self._say(outcome)
            self._backlog.hold(reasons)
            self._backlog.put_back(left)
        elif self._quarantine.is_empty:
            # All of it is published: a refusal after this is a new one, and is logged.
            self._said.clear()

    def _say(self, outcome: Outcome) -> None:
        reasons = {*(fault.why for fault in outcome.faults.values()), *outcome.refused.values()}
        for why in sorted(reasons - self._said):
            _log.error("%s: what is refused is tried apart, at growing intervals: %s", self._name, why)
        if len(self._said) > 1_000:  # noqa: PLR2004 - so that it does not grow for ever
            self._said.clear()
        self._said |= reasons

    def wait_s(self) -> float:
        """Return the seconds after which `step` has something to do, if nothing wakes it before."""
        now = time.monotonic()
        if not self._main.is_open:
            return 1.0 if self._main.bound.is_busy else max(0.0, self._main.open_at - now)
        wait = 1.0
        if not self._trial.bound.is_busy and not self._quarantine.is_empty:
            opens_in = 0.0 if self._trial.is_open else self._trial.open_at - now
            wait = min(wait, max(opens_in, 0.0 if self._trial.entries else self._quarantine.wait_s(now), 0.0))
        return wait

    def trim(self) -> None:
        """Trim the done log as far as all in it is settled. All that was handed over as published is durably so."""
        floors = [path.floor for path in (self._main, self._trial) if path.floor is not None]
        offset = min([self._high, *floors])
        if offset > self._forgotten and self._main.is_open and not self._main.bound.is_busy:
            self._forgotten = offset
            self._main.take = lambda _: None
            self._main.bound.start("trim", lambda outbound: outbound.forget(offset))

    def reset(self) -> None:
        """Begin anew after the store failed: what was published and not marked is found in the done log."""
        self._main.is_open, self._main.open_at = False, time.monotonic() + _AGAIN_S
        self._leave_both()

    def abandon(self) -> None:
        """Give the shard up at once: its next owner shuts this one out."""
        for path in (self._main, self._trial):
            path.bound.leave()
            path.is_open = False

    def close(self, limit_s: float) -> None:
        """Close both paths; what is under way is left behind. Waits a moment, at most `limit_s`, for what is closed."""
        deadline = time.monotonic() + min(limit_s, _CLOSE_S)
        for path in (self._trial, self._main):
            path.bound.close(max(0.0, deadline - time.monotonic()))
            path.is_open = False
