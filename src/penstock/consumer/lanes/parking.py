"""Parking: what becomes of messages that did not get done at once.

A failed message waits for its retry, a deferred one for its completion, an exhausted one for the broker to take it
elsewhere; whatever comes of its key meanwhile waits behind it. Each call is for a lane that the caller holds.

A batch that failed as a whole is parked as a whole, under the keys of all its messages, and tried again as it was, for
it may have been the database. When its policy gives it up it is split by keys, and each of its messages is tried alone,
so that none is given up for the failure of another.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from itertools import islice

from penstock.clients.cluster import Clock
from penstock.consumer.assignments import (
    Assignment,
    ConsumerLane,
    ConsumerParked,
    Fetch,
    Item,
    require_key,
    size_in_bytes,
)
from penstock.consumer.failure_text import attached, failure_text, raised_where, short_text
from penstock.consumer.handlers.options import OnFailure
from penstock.consumer.handlers.results import DeferredCompletion
from penstock.consumer.handlers.route import Failed
from penstock.consumer.lanes.slot import ExecutionSlot, Unfinished
from penstock.consumer.outbox.dead_letters import DeadLetterPublisher, ExhaustedMessage
from penstock.consumer.outbox.outbox import Tries
from penstock.consumer.timers import Timer, Timers
from penstock.errors import GivenUpError, HandlerTimeLimitError, PenstockError, class_name, raised
from penstock.message import Record, position_of
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


def place_of(record: Record) -> tuple[str, int, int]:
    """Return topic, partition and offset of a record."""
    return record.topic(), record.partition(), record.offset()


def key_of(item: Item) -> Hashable:
    """Return what a message has in common with those that wait for it; its place where its key could not be had."""
    try:
        return require_key(item)
    except PenstockError:
        return place_of(item[2])


@dataclass(slots=True, eq=False)
class GiveUp:
    """A request: somebody wants the message that holds a partition in a dead-letter topic, now.

    Any thread asks, and wakes the key of the message afterwards; only the holder of its lane acts. The `outcome`
    decides who comes first: the holder has it running, or who asked has cancelled it. So the request is carried out
    once or never, and who asked knows which.
    """

    place: tuple[Assignment, int]
    topic: str
    #: Running when the message is on its way; then why the topic has it not, or None where it has.
    outcome: Future[str | None] = field(default_factory=Future)


#: The requests that nobody has acted on yet. Any thread: operations of a `dict` are atomic.
GiveUps = dict[tuple[Assignment, int], GiveUp]


class Parking:
    """Parks keys and decides what becomes of their heads. Thread-safe: each call is for a lane that is held."""

    def __init__(
        self,
        clock: Clock,
        *,
        timers: Timers,
        publisher: DeadLetterPublisher,
        wake: Callable[[ConsumerParked], None],
        fail: Callable[[BaseException], None],
    ) -> None:
        self._now = clock.monotonic
        self._timers = timers
        self._publisher = publisher
        self._wake = wake
        self._fail = fail
        #: Completions that are out, with what they belong to. Any thread: operations of a `dict` are atomic.
        self.deferred: dict[DeferredCompletion, Fetch] = {}
        self.give_ups: GiveUps = {}

    def park(self, lane: ConsumerLane, keys: Sequence[Hashable], items: Sequence[Item]) -> ConsumerParked:
        """Park a message under its key, or a batch under the keys of all its messages; none of them is parked."""
        parked = lane.park(*keys)
        for item in items:
            self.append(parked, item)
        return parked

    def append(self, parked: ConsumerParked, item: Item) -> None:
        """Let a message of a parked key wait behind its head."""
        parked.waiting.append(item)
        item[0].assignment.tracker.park(1, size_in_bytes(item[2]))
        if self.give_ups or parked.is_blocked:
            # It may be asked for already, or be the message of the call that blocks it, once more.
            parked.lane.due.append(parked)

    def wait_until(self, parked: ConsumerParked, due_at: float) -> None:
        """Let the head wait for a time."""
        parked.due_at = due_at
        self._timers.add(due_at, partial(self._wake, parked))

    @staticmethod
    def release(parked: ConsumerParked) -> None:
        """Park a key no more behind which nothing waits, unless a call for it goes on."""
        for key in () if parked.is_blocked else parked.keys:
            # It may be another's, where this was split.
            if parked.lane.parked.get(key) is parked:
                del parked.lane.parked[key]

    def next_head(self, parked: ConsumerParked, slot: ExecutionSlot) -> None:
        """Go on to the message behind a head that is done with."""
        fetch, _, record = parked.waiting[0]
        if not parked.is_finished:
            fetch.assignment.tracker.park(-1, -size_in_bytes(record))
        parked.next_head()
        slot.record = None

    def split(self, parked: ConsumerParked, *, alone: bool = False) -> None:
        """Part what is parked as a batch into its keys, each with the tries of the batch.

        `alone`: the messages of its call are tried by themselves, now.
        """
        self.release(parked)
        lane, together = parked.lane, parked.portions[0] if parked.portions else 1
        waiting, parked.waiting = parked.waiting, deque()
        for place, item in enumerate(waiting):
            key = key_of(item)
            own = lane.parked.get(key)
            if own is None:
                own = lane.park(key)
                lane.due.append(own)
                if place < together:
                    own.attempts, own.since, own.failed_with = parked.attempts, parked.since, parked.failed_with
                    own.over_time_limit, own.state = parked.over_time_limit, parked.state
                    own.portions.append(1)
                    self.wait_until(own, parked.due_at)
            elif place < together:
                own.count_behind(item, parked.attempts)
                own.portions.extend([1] * alone)
            own.waiting.append(item)
            if item[:2] in parked.tries_behind:
                own.count_behind(item, parked.tries_behind[item[:2]])

    def park_unfinished(
        self,
        lane: ConsumerLane,
        key: Hashable,
        item: Item,
        outcome: Unfinished,
        slot: ExecutionSlot,
        *,
        tries: Tries | None = None,
    ) -> None:
        """Park the key of a message that did not get done, by itself; `tries`: those before this one."""
        parked = self.park(lane, (key,), (item,))
        # Here, not in `fail_head`: that may be later, with a slot that began something else meanwhile.
        parked.attempts, parked.since = tries or (0, slot.started)
        self.settle_head(parked, outcome, slot)

    def settle_head(self, parked: ConsumerParked, outcome: Unfinished, slot: ExecutionSlot) -> None:
        """Decide what becomes of a head that did not get done."""
        if isinstance(outcome, DeferredCompletion):
            self.defer_head(parked, outcome, slot)
        else:
            self.fail_head(parked, outcome, slot)

    def defer_head(self, parked: ConsumerParked, completion: DeferredCompletion, slot: ExecutionSlot) -> None:
        """Let a parked key wait for a completion. It may come from any thread, at any time."""
        item = fetch, _, _ = parked.waiting[0]
        if not completion._take():  # noqa: SLF001 - the engine's half of the class
            twice = PenstockError(
                "the DeferredCompletion that the handler returned belongs to another message; make one for each"
            )
            self.fail_head(parked, Failed(twice), slot)
            return
        parked.send_out(KeyState.DEFERRED)
        timer: Timer | None = None

        def resolve(error: BaseException | None) -> None:
            if error is None:
                self._complete(item)
            # Before the key is woken: the holder reads its state only then.
            parked.resolve(KeyState.HANDLED if error is None else KeyState.FAILED, error)
            self._wake(parked)
            if timer is not None:
                # It refers to the message, which would stay in memory until the timeout, outside of every limit.
                self._timers.cancel(timer)
            # Last: a drain that waits for deferred completions must see the offset done, and the woken lane.
            self.deferred.pop(completion, None)

        self.deferred[completion] = fetch
        if completion.timeout is not None:
            late = TimeoutError(f"the completion was put off and did not come within {completion.timeout:g} s")
            timer = self._timers.add(self._now() + completion.timeout, partial(completion.fail, late))
        completion._attach(resolve)  # noqa: SLF001 - the engine's half of the class

    def fail_head(self, parked: ConsumerParked, failure: Failed, slot: ExecutionSlot, *, together: int = 1) -> None:
        """Decide what becomes of the failed head of a parked key; so many messages failed `together` with it."""
        error = failure.error
        self._note_failure(parked, failure, slot)
        former = parked.portions.popleft() if parked.portions else 0
        parked.portions.appendleft(together)
        # Its call may have had fewer than the one before, as by a rate: those left out keep the tries of that one.
        for item in islice(parked.waiting, together, former):
            parked.count_behind(item, parked.attempts - 1)
        # What is left of a batch is judged without what was revoked meanwhile.
        while parked.portions[0] > 1 and not parked.waiting[0][0].assignment.active:
            self.next_head(parked, slot)
        fetch, _, record = parked.waiting[0]
        if not fetch.assignment.active:
            # Nothing is judged: its next owner handles it again. Read after the key was parked: a revocation that
            # comes later wakes it, and here the lane's holder does.
            parked.lane.due.append(parked)
            return
        if self.give_ups and self.give_up_if_asked(parked):
            return
        now = self._now()
        place, name = position_of(record), fetch.assignment.route.handler.name
        delay = None
        if not failure.permanent:
            try:
                delay = fetch.assignment.route.retry.delay_after(parked.attempts, now - parked.since, error)
            except:  # noqa: E722 - see `raised`; the user's code decides there
                defect = raised()
                self._stop(
                    parked,
                    f"the retry policy of {name} failed with {raised_where(defect)} "
                    f"when it was asked about {place}; {self._publisher.limits.ends}: correct the policy",
                    defect,
                )
                return
        if delay is not None:
            _log.info(
                "%s failed in %s, try %d; again in %.3f s: %s", place, name, parked.attempts, delay, short_text(error)
            )
            # By a policy whose wait has no end, the key waits until its partition goes.
            parked.state = KeyState.UNSCHEDULED if math.isinf(delay) else KeyState.WAITING
            if parked.state is KeyState.WAITING:
                self.wait_until(parked, now + delay)
        elif together > 1:
            # Which message failed is not known yet: none is given up for the failure of another.
            _log.info("%s failed in a batch of %s as often as its policy tries; it is tried alone now", place, name)
            parked.state, parked.due_at = KeyState.WAITING, now
            self.split(parked, alone=True)
        else:
            self.give_up(parked, failure, slot)

    def _stop(self, parked: ConsumerParked, why: str, cause: BaseException) -> None:
        """Stop the consumer because of a head, which stays."""
        parked.state = KeyState.STOPPING
        stop = PenstockError(why)
        stop.__cause__ = cause
        self._fail(stop)

    def _note_failure(self, parked: ConsumerParked, failure: Failed, slot: ExecutionSlot) -> None:
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
            failure.call.ended.add_done_callback(lambda _: self._wake(parked))

    def give_up(self, parked: ConsumerParked, failure: Failed, slot: ExecutionSlot) -> None:
        """Do with the head of a parked key what its handler chose for messages whose tries are exhausted."""
        fetch, _, record = parked.waiting[0]
        error, route, place = failure.error, fetch.assignment.route, position_of(record)
        handler = route.handler
        retried = 0 if route.retried is None else route.retried(record)
        if retried < len(handler.retry_delays) and not failure.permanent:
            self._send(parked, error, retry=retried)
            return
        is_lost = handler.on_failure in (OnFailure.DEAD_LETTER, OnFailure.DROP)
        if is_lost and (too_many := self._publisher.limits.refusal(place)) is not None:
            self._stop(parked, too_many, error)
            return
        what = f"{handler.name} failed it {parked.attempts} times, last with {type(error).__name__}"
        if handler.on_failure is OnFailure.DEAD_LETTER:
            self._send(parked, error)
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
            parked.lane.due.append(parked)
        else:
            self._stop(
                parked,
                f"{handler.name} failed {place} {parked.attempts} times, last with {raised_where(error)}; "
                f"{self._publisher.limits.ends}: correct the handler, or choose on_failure='dead_letter', 'drop' or "
                "'hold'",
                error,
            )

    def give_up_if_asked(self, parked: ConsumerParked) -> bool:
        """Send the head of a parked key to its dead letters where somebody has asked for that; return whether.

        Whatever its handler chose for failures: this is for what that choice, or a long wait, holds a partition with.
        What is parked as a batch is split for it, and each key looked at by itself.
        """
        if not parked.waiting or parked.state not in GIVEABLE:
            return False
        if len(parked.keys) > 1:
            is_asked = any((fetch.assignment, record.offset()) in self.give_ups for fetch, _, record in parked.waiting)
            if is_asked:
                self.split(parked)
            return is_asked
        fetch, _, record = parked.waiting[0]
        assignment = fetch.assignment
        asked = self.give_ups.pop((assignment, record.offset()), None) if assignment.active else None
        if asked is None or not asked.outcome.set_running_or_notify_cancel():
            return False
        place = f"{assignment}@{record.offset()}"
        if assignment.tracker.watermark != record.offset():
            asked.outcome.set_result(f"{place} does not hold its partition: offset {assignment.tracker.watermark} does")
            return False
        self._send(parked, GivenUpError(place, parked.tries, parked.failed_with), asked=asked)
        return True

    def _send(
        self, parked: ConsumerParked, error: BaseException, *, retry: int | None = None, asked: GiveUp | None = None
    ) -> None:
        """Have the head written to another topic; its key waits until a broker has it or refuses it."""
        asked_at = None if asked is None else parked.state
        parked.send_out(KeyState.SENDING)

        def settle(state: KeyState, error: BaseException | None = None, why_not: str | None = None) -> None:
            parked.resolve(state, error)
            self._wake(parked)
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
