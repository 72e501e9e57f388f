"""Parking: what becomes of messages that did not get done at once.

A failed message waits for its retry, a deferred one for its completion, an exhausted one for the broker to take it
elsewhere; whatever comes of its key meanwhile waits behind it. Each call is for a lane that the caller holds.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from functools import partial

from penstock.clients.cluster import Clock
from penstock.consumer.assignments import ConsumerLane, ConsumerParked, Fetch, Item, size_in_bytes
from penstock.consumer.failure_text import attached, failure_text, raised_where, short_text
from penstock.consumer.handlers.options import OnFailure
from penstock.consumer.handlers.results import DeferredCompletion, ResultError
from penstock.consumer.handlers.route import Failed, Route
from penstock.consumer.lanes.give_ups import GiveUp, GiveUps
from penstock.consumer.lanes.slot import ExecutionSlot
from penstock.consumer.outbox.dead_letters import DeadLetterPublisher, ExhaustedMessage, NoRetryError
from penstock.consumer.outbox.outbox import RefusedResults
from penstock.consumer.timers import Timer, Timers
from penstock.errors import GivenUpError, HandlerTimeLimitError, PenstockError, class_name
from penstock.message import position_of
from penstock.routing import KeyState

_log = logging.getLogger(__name__)

#: Where a head is in its lane, and may be given up.
GIVEABLE = frozenset({KeyState.WAITING, KeyState.UNSCHEDULED, KeyState.HELD})


@dataclass(frozen=True, slots=True)
class NotDue:
    """Under which a message of a retry topic is parked until its time: it holds no key meanwhile."""

    #: The key under which it waits afterwards.
    key: Hashable = field(repr=False)
    #: Topic, partition and offset.
    place: tuple[str, int, int]


@dataclass(frozen=True, slots=True)
class FailedBatch:
    """A batch of several messages that failed as a whole."""

    #: How many messages of it each key has.
    sizes: Mapping[Hashable, int] = field(repr=False)
    keys: tuple[Hashable, ...] = field(repr=False)
    #: When it is tried again, or None for never, by the number of tries and the time of the first: its keys come back
    #: at one time.
    due_at: dict[tuple[int, float], float | None] = field(default_factory=dict)


class Parking:
    """Parks keys and decides what becomes of their heads. Thread-safe: each call is for a lane that is held."""

    def __init__(
        self,
        clock: Clock,
        *,
        timers: Timers,
        publisher: DeadLetterPublisher,
        wake_key: Callable[[ConsumerLane, Hashable], None],
        fail: Callable[[BaseException], None],
    ) -> None:
        self._now = clock.monotonic
        self._timers = timers
        self._publisher = publisher
        self._wake_key = wake_key
        self._fail = fail
        #: Completions that are out, with what they belong to. Any thread: operations of a `dict` are atomic.
        self.deferred: dict[DeferredCompletion, Fetch] = {}
        #: What is to be given up though its tries are not exhausted.
        self.give_ups = GiveUps()

    def wake_at(self, due: float, lane: ConsumerLane, key: Hashable) -> None:
        """Wake a parked key when its time has come."""
        self._timers.add(due, partial(self._wake_key, lane, key))

    def park_unfinished(
        self,
        lane: ConsumerLane,
        key: Hashable,
        item: Item,
        outcome: Failed | DeferredCompletion,
        slot: ExecutionSlot,
        *,
        failed_batch: FailedBatch | None = None,
    ) -> None:
        """Park the key of a message that did not get done at its first try, alone or in a batch that failed whole."""
        parked = self.park(lane, key, item)
        # Here, not in `fail_head`: that may be later, with a slot that began something else meanwhile.
        parked.since = slot.started
        if isinstance(outcome, DeferredCompletion):
            self.defer_head(lane, key, parked, outcome, slot)
        else:
            self.fail_head(lane, key, parked, outcome, slot, failed_batch=failed_batch)

    def park_refused(self, lane: ConsumerLane, key: Hashable, refused: RefusedResults, slot: ExecutionSlot) -> None:
        """Park the key of a message whose results were refused, as if its handler had failed."""
        parked = self.park(lane, key, refused.item)
        if refused.tries is None:
            parked.since = self._now()
        else:
            parked.attempts, parked.since = refused.tries
        self.fail_head(lane, key, parked, Failed(refused.error), slot)

    def park(self, lane: ConsumerLane, key: Hashable, item: Item) -> ConsumerParked:
        """Park a key that is not parked on a message."""
        parked = lane.park(key)
        self.append(lane, key, item)
        return parked

    def append(self, lane: ConsumerLane, key: Hashable, item: Item) -> None:
        """Let a message of a parked key wait behind its head."""
        parked = lane.parked[key]
        parked.waiting.append(item)
        item[0].assignment.tracker.park(1, size_in_bytes(item[2]))
        if self.give_ups or parked.is_blocked:
            # It may be asked for already, or be the message of the call that blocks it, once more.
            lane.due.append(key)

    @staticmethod
    def release(lane: ConsumerLane, key: Hashable) -> None:
        """Park a key no more behind which nothing waits, unless a call for it goes on."""
        if not lane.parked[key].is_blocked:
            del lane.parked[key]

    def next_head(self, parked: ConsumerParked, slot: ExecutionSlot) -> None:
        """Go on to the message behind a head that is done with."""
        fetch, _, record = parked.waiting[0]
        if not parked.is_finished:
            fetch.assignment.tracker.park(-1, -size_in_bytes(record))
        parked.next_head()
        slot.record = None

    def defer_head(
        self,
        lane: ConsumerLane,
        key: Hashable,
        parked: ConsumerParked,
        completion: DeferredCompletion,
        slot: ExecutionSlot,
    ) -> None:
        """Let a parked key wait for a completion. It may come from any thread, at any time."""
        item = fetch, _, _ = parked.waiting[0]
        if not completion._take():  # noqa: SLF001 - the engine's half of the class
            twice = PenstockError(
                "the DeferredCompletion that the handler returned belongs to another message; make one for each"
            )
            self.fail_head(lane, key, parked, Failed(twice), slot)
            return
        parked.send_out(KeyState.DEFERRED)
        timeout = completion.timeout
        timer: Timer | None = None

        def resolve(error: BaseException | None) -> None:
            if error is None:
                self._complete(item)
            # Before the key is woken: the holder reads its state only then.
            parked.resolve(KeyState.HANDLED if error is None else KeyState.FAILED, error)
            self._wake_key(lane, key)
            if timer is not None:
                # It refers to the message, which would stay in memory until the timeout, outside of every limit.
                self._timers.cancel(timer)
            # Last: a drain that waits for deferred completions must see the offset done, and the woken lane.
            self.deferred.pop(completion, None)

        self.deferred[completion] = fetch
        if timeout is not None:
            late = TimeoutError(f"the completion was put off and did not come within {timeout:g} s")
            timer = self._timers.add(self._now() + timeout, partial(completion.fail, late))
        completion._attach(resolve)  # noqa: SLF001 - the engine's half of the class

    def fail_head(
        self,
        lane: ConsumerLane,
        key: Hashable,
        parked: ConsumerParked,
        failure: Failed,
        slot: ExecutionSlot,
        *,
        failed_batch: FailedBatch | None = None,
    ) -> None:
        """Decide what becomes of the failed head of a parked key; `failed_batch`: it failed with a whole batch."""
        error, (fetch, _, record) = failure.error, parked.waiting[0]
        if not isinstance(error, NoRetryError):
            self._note_failure(lane, key, parked, failure, slot)
        if not fetch.assignment.active:
            # Nothing is judged: its next owner handles it again. Read after the key was parked: a revocation that
            # comes later wakes it, and here the lane's holder does.
            lane.due.append(key)
            return
        if isinstance(error, NoRetryError):
            self._give_up(lane, key, parked, Failed(error.failure, permanent=True), slot)
            return
        if self.give_ups and self.give_up_if_asked(lane, key, parked):
            return
        is_permanent, now = failure.permanent or isinstance(error, ResultError), self._now()
        parked.batch_keys = () if failed_batch is None else failed_batch.keys
        parked.tried_alone = max(1, parked.tried_alone) if failed_batch is None else 0
        due_at = None
        if not is_permanent:
            try:
                due_at = self._due_at(fetch.assignment.route, parked, error, now, failed_batch)
            except Exception as defect:  # noqa: BLE001 - the user's code decides there
                self._stop(
                    parked,
                    f"the retry policy of {fetch.assignment.route.handler.name} failed with {raised_where(defect)} "
                    f"when it was asked about {position_of(record)}; {self._publisher.limits.ends}: correct the policy",
                    defect,
                )
                return
        place, name = position_of(record), fetch.assignment.route.handler.name
        if due_at is not None:
            why, wait_s = short_text(error), due_at - now
            _log.info("%s failed in %s, try %d; again in %.3f s: %s", place, name, parked.attempts, wait_s, why)
            # By a policy whose wait has no end, the key waits until its partition goes.
            parked.state = KeyState.UNSCHEDULED if math.isinf(due_at) else KeyState.WAITING
            parked.due_at = due_at
            if parked.state is KeyState.WAITING:
                self.wake_at(due_at, lane, key)
        elif failed_batch is not None and not is_permanent:
            # Which message failed is not known yet: none is given up for the failure of another.
            _log.info("%s failed in a batch of %s as often as its policy tries; it is tried alone now", place, name)
            parked.batch_keys, parked.tried_alone = (), failed_batch.sizes[key]
            parked.state, parked.due_at = KeyState.WAITING, now
            lane.due.append(key)
        else:
            self._give_up(lane, key, parked, Failed(error, permanent=is_permanent), slot)

    def _stop(self, parked: ConsumerParked, why: str, cause: BaseException) -> None:
        """Stop the consumer because of a head, which stays."""
        parked.state = KeyState.STOPPING
        stop = PenstockError(why)
        stop.__cause__ = cause
        self._fail(stop)

    def _note_failure(
        self, lane: ConsumerLane, key: Hashable, parked: ConsumerParked, failure: Failed, slot: ExecutionSlot
    ) -> None:
        """Count a failure; where its call goes on, have the key wait for that."""
        slot.failed += 1
        parked.attempts += 1
        parked.failed_with = class_name(failure.error)
        limit = parked.waiting[0][0].assignment.route.time_limit
        if isinstance(failure.error, HandlerTimeLimitError) and limit is not None:
            slot.over_time_limit += 1
            parked.over_time_limit += 1
        if failure.call is not None:
            parked.call = failure.call
            failure.call.ended.add_done_callback(lambda _: self._wake_key(lane, key))

    def _give_up(
        self, lane: ConsumerLane, key: Hashable, parked: ConsumerParked, failure: Failed, slot: ExecutionSlot
    ) -> None:
        """Do with the head of a parked key what its handler chose for messages whose tries are exhausted."""
        fetch, _, record = parked.waiting[0]
        error, route, place = failure.error, fetch.assignment.route, position_of(record)
        handler = route.handler
        retried = 0 if route.retried is None else route.retried(record)
        if retried < len(handler.retry_delays) and not failure.permanent:
            self._send(lane, key, parked, error, retry=retried)
            return
        is_lost = handler.on_failure in (OnFailure.DEAD_LETTER, OnFailure.DROP)
        if is_lost and (too_many := self._publisher.limits.refusal(place)) is not None:
            self._stop(parked, too_many, error)
            return
        what = f"{handler.name} failed it {parked.attempts} times, last with {type(error).__name__}"
        if handler.on_failure is OnFailure.DEAD_LETTER:
            self._send(lane, key, parked, error)
        elif handler.on_failure is OnFailure.HOLD:
            parked.state = KeyState.HELD
            _log.error(
                "%s is held: %s; its key waits and its offset is not committed, everything else goes on: remove the "
                "cause and start the app again\n%s",
                place,
                what,
                failure_text(error),
                extra=attached(error),
            )
        elif handler.on_failure is OnFailure.DROP:
            _log.error("%s was dropped: %s\n%s", place, what, failure_text(error), extra=attached(error))
            self._complete(parked.waiting[0])
            slot.dropped += 1
            parked.state = KeyState.DONE
            lane.due.append(key)
        else:
            self._stop(
                parked,
                f"{handler.name} failed {place} {parked.attempts} times, last with {raised_where(error)}; "
                f"{self._publisher.limits.ends}: correct the handler, or choose on_failure='dead_letter', 'drop' or "
                "'hold'",
                error,
            )

    def give_up_if_asked(self, lane: ConsumerLane, key: Hashable, parked: ConsumerParked) -> bool:
        """Send the head of a parked key to its dead letters where somebody has asked for that; return whether.

        Whatever its handler chose for failures: this is for what that choice, or a long wait, holds a partition with.
        """
        if not parked.waiting:
            return False
        fetch, _, record = parked.waiting[0]
        assignment = fetch.assignment
        if parked.state not in GIVEABLE or not assignment.active:
            return False
        asked = self.give_ups.take((assignment, record.offset()))
        if asked is None:
            return False
        place = f"{assignment}@{record.offset()}"
        if assignment.tracker.watermark != record.offset():
            asked.outcome.set_result(f"{place} does not hold its partition: offset {assignment.tracker.watermark} does")
            return False
        parked.batch_keys = ()
        self._send(lane, key, parked, GivenUpError(place, parked.tries, parked.failed_with), asked=asked)
        return True

    @staticmethod
    def _due_at(
        route: Route, parked: ConsumerParked, error: BaseException, now: float, failed_batch: FailedBatch | None
    ) -> float | None:
        """Return when the policy has a failed head tried again, or None where it gives it up."""
        known = {} if failed_batch is None else failed_batch.due_at
        tries = parked.attempts, parked.since
        if tries not in known:
            delay = route.retry.delay_after(parked.attempts, now - parked.since, error)
            known[tries] = None if delay is None else now + delay
        return known[tries]

    def _send(
        self,
        lane: ConsumerLane,
        key: Hashable,
        parked: ConsumerParked,
        error: BaseException,
        *,
        retry: int | None = None,
        asked: GiveUp | None = None,
    ) -> None:
        """Have the head written to another topic; its key waits until a broker has it or refuses it."""
        asked_at = None if asked is None else parked.state
        parked.send_out(KeyState.SENDING)

        def settle(state: KeyState, error: BaseException | None = None, why_not: str | None = None) -> None:
            parked.resolve(state, error)
            self._wake_key(lane, key)
            if asked is not None:
                asked.outcome.set_result(why_not)

        self._publisher.publish(
            ExhaustedMessage(parked.waiting[0], error, parked.tries, retry, settle, asked_at=asked_at)
        )

    @staticmethod
    def _complete(item: Item) -> None:
        """Complete the head of a parked key; it counts as parked no more, though its lane sees it only later."""
        fetch, index, record = item
        fetch.assignment.tracker.complete(fetch.block, (index,))
        # Else it would be subtracted from the bytes in flight twice until then, and too much be fetched (I5).
        fetch.assignment.tracker.park(-1, -size_in_bytes(record))
