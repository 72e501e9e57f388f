"""Parking: messages that wait for a retry, a completion or a dead letter.

A failed message waits for its retry time, a deferred one for its completion, an exhausted one until a broker has its
dead letter or retry message. Later messages of its key wait behind it. The caller of every method holds the lane.

A batch that fails as a whole is parked as a whole, under the keys of all its messages, and retried unchanged, because
the database may have been the cause. When its policy gives it up, it is split by keys and each message is tried alone.
So no message is given up because another one failed.
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

#: States in which a head is in its lane and may be given up.
GIVEABLE = frozenset({KeyState.WAITING, KeyState.UNSCHEDULED, KeyState.HELD})


@dataclass(frozen=True, slots=True)
class NotDue:
    """The key of a retry-topic message until its retry time. It blocks no other message."""

    #: The message's own key, under which it waits afterwards.
    key: Hashable = field(repr=False)
    #: Topic, partition and offset.
    place: tuple[str, int, int]


def place_of(record: Record) -> tuple[str, int, int]:
    """Return topic, partition and offset of a record."""
    return record.topic(), record.partition(), record.offset()


def key_of(item: Item) -> Hashable:
    """Return the key that a message shares with others; its place if the key cannot be determined."""
    try:
        return require_key(item)
    except PenstockError:
        return place_of(item[2])


@dataclass(slots=True, eq=False)
class GiveUp:
    """A request to write the message that holds a partition to a dead-letter topic now.

    Any thread adds a request, and then wakes the key of the message. Only the lane's holder acts on it. The `outcome`
    decides a race: either the holder sets it running, or the requester cancels it. So the request is executed once or
    never, and the requester knows which.
    """

    place: tuple[Assignment, int]
    topic: str
    #: Running while the message is sent. Its result is None if the topic has the message, else the reason why not.
    outcome: Future[str | None] = field(default_factory=Future)


class Parking:
    """Parks keys and decides about their heads. Thread-safe: the caller of every method holds the lane."""

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
        #: Open completions, each with the fetch of its message. Any thread: operations of a `dict` are atomic.
        self.deferred: dict[DeferredCompletion, Fetch] = {}
        #: Requests by assignment and offset that wait for the lane's holder. Any thread, as above.
        self.give_ups: dict[tuple[Assignment, int], GiveUp] = {}

    def park(self, lane: ConsumerLane, keys: Sequence[Hashable], items: Sequence[Item]) -> ConsumerParked:
        """Park a message under its key, or a batch under the keys of all its messages. None of the keys is parked."""
        parked = lane.park(*keys)
        for item in items:
            self.append(parked, item)
        return parked

    def append(self, parked: ConsumerParked, item: Item) -> None:
        """Put a message behind the head of its parked key."""
        parked.waiting.append(item)
        item[0].assignment.tracker.park(1, size_in_bytes(item[2]))
        if self.give_ups or parked.is_blocked:
            # A request may exist for this message, or its own abandoned call blocks the key (it is fetched again).
            parked.lane.due.append(parked)

    def wait_until(self, parked: ConsumerParked, due_at: float) -> None:
        """Set the retry time of the head."""
        parked.due_at = due_at
        self._timers.add(due_at, partial(self._wake, parked))

    @staticmethod
    def release(parked: ConsumerParked) -> None:
        """Remove a parked key that has no waiting message, unless an abandoned call for it is running."""
        for key in () if parked.is_blocked else parked.keys:
            # After a split, the key may belong to another entry.
            if parked.lane.parked.get(key) is parked:
                del parked.lane.parked[key]

    def next_head(self, parked: ConsumerParked, slot: ExecutionSlot) -> None:
        """Go on to the message behind a finished head."""
        fetch, _, record = parked.waiting[0]
        if not parked.is_finished:
            fetch.assignment.tracker.park(-1, -size_in_bytes(record))
        parked.next_head()
        slot.record = None

    def split(self, parked: ConsumerParked, *, alone: bool = False) -> None:
        """Split a parked batch by keys. Each key keeps the tries of the batch.

        `alone`: the messages of the last call are tried alone, now.
        """
        self.release(parked)
        lane, together = parked.lane, parked.portions[0] if parked.portions else 1
        waiting, parked.waiting = parked.waiting, deque()
        for place, item in enumerate(waiting):
            key = key_of(item)
            entry = lane.parked.get(key)
            if entry is None:
                entry = lane.park(key)
                lane.due.append(entry)
                if place < together:
                    entry.attempts, entry.since, entry.failed_with = parked.attempts, parked.since, parked.failed_with
                    entry.over_time_limit, entry.state = parked.over_time_limit, parked.state
                    entry.portions.append(1)
                    self.wait_until(entry, parked.due_at)
            elif place < together:
                entry.count_behind(item, parked.attempts)
                entry.portions.extend([1] * alone)
            entry.waiting.append(item)
            if item[:2] in parked.tries_behind:
                entry.count_behind(item, parked.tries_behind[item[:2]])

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
        """Park the key of a message that is not done. `tries`: the tries before this one."""
        parked = self.park(lane, (key,), (item,))
        # Not in `fail_head`: it may run later, when the slot has started another message.
        parked.attempts, parked.since = tries or (0, slot.started)
        self.settle_head(parked, outcome, slot)

    def settle_head(self, parked: ConsumerParked, outcome: Unfinished, slot: ExecutionSlot) -> None:
        """Handle a head that is not done."""
        if isinstance(outcome, DeferredCompletion):
            self.defer_head(parked, outcome, slot)
        else:
            self.fail_head(parked, outcome, slot)

    def defer_head(self, parked: ConsumerParked, completion: DeferredCompletion, slot: ExecutionSlot) -> None:
        """Let a parked key wait for a completion, which any thread may give at any time."""
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
            # Before the key is woken: its holder then reads this state.
            parked.resolve(KeyState.HANDLED if error is None else KeyState.FAILED, error)
            self._wake(parked)
            if timer is not None:
                # The timer refers to the message, which would stay in memory until the timeout, outside of every limit.
                self._timers.cancel(timer)
            # Last: a drain that waits for completions must see the offset done and the lane woken.
            self.deferred.pop(completion, None)

        self.deferred[completion] = fetch
        if completion.timeout is not None:
            late = TimeoutError(f"the deferred completion did not come within {completion.timeout:g} s")
            timer = self._timers.add(self._now() + completion.timeout, partial(completion.fail, late))
        completion._attach(resolve)  # noqa: SLF001 - the engine's half of the class

    def fail_head(self, parked: ConsumerParked, failure: Failed, slot: ExecutionSlot, *, together: int = 1) -> None:
        """Schedule the retry of a failed head, or give it up. `together`: the number of messages in the failed call."""
        error = failure.error
        self._note_failure(parked, failure, slot)
        former = parked.portions.popleft() if parked.portions else 0
        parked.portions.appendleft(together)
        # The call may have had fewer messages than the one before (by a rate): the others keep the tries of that one.
        for item in islice(parked.waiting, together, former):
            parked.count_behind(item, parked.attempts - 1)
        # Revoked messages are dropped before the rest of a batch is judged.
        while parked.portions[0] > 1 and not parked.waiting[0][0].assignment.active:
            self.next_head(parked, slot)
        fetch, _, record = parked.waiting[0]
        if not fetch.assignment.active:
            # The next owner handles it again. `active` is read after the key was parked: a later revocation wakes the
            # key, for an earlier one this does.
            parked.lane.due.append(parked)
            return
        if self.give_ups and self.give_up_if_requested(parked):
            return
        now = self._now()
        place, name = position_of(record), fetch.assignment.route.handler.name
        delay = None
        if not failure.permanent:
            try:
                delay = fetch.assignment.route.retry.delay_after(parked.attempts, now - parked.since, error)
            except:  # noqa: E722 - see `raised`; the policy is the user's code
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
            # If the policy's wait is infinite, the key waits until its partition is revoked.
            parked.state = KeyState.UNSCHEDULED if math.isinf(delay) else KeyState.WAITING
            if parked.state is KeyState.WAITING:
                self.wait_until(parked, now + delay)
        elif together > 1:
            # The failed message is not known yet: none is given up because another one failed.
            _log.info(
                "%s and its batch failed in %s as often as the retry policy allows; each message is tried alone now",
                place,
                name,
            )
            parked.state, parked.due_at = KeyState.WAITING, now
            self.split(parked, alone=True)
        else:
            self.give_up(parked, failure, slot)

    def _stop(self, parked: ConsumerParked, why: str, cause: BaseException) -> None:
        """Stop the consumer because of a head. The head stays parked."""
        parked.state = KeyState.STOPPING
        stop = PenstockError(why)
        stop.__cause__ = cause
        self._fail(stop)

    def _note_failure(self, parked: ConsumerParked, failure: Failed, slot: ExecutionSlot) -> None:
        """Count a failure. If its call was abandoned, block the key until the call returns."""
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
        """Apply the handler's choice for exhausted messages to the head of a parked key."""
        fetch, _, record = parked.waiting[0]
        error, route, place = failure.error, fetch.assignment.route, position_of(record)
        handler = route.handler
        retried = 0 if route.retry_headers is None else route.retry_headers.rounds(record)
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

    def give_up_if_requested(self, parked: ConsumerParked) -> bool:
        """Write the head of a parked key to its dead-letter topic if that was requested; return whether.

        The handler's choice for failures does not matter: the request is for a partition that this choice, or a long
        wait, holds. A parked batch is split for it, and each key is checked separately.
        """
        if not parked.waiting or parked.state not in GIVEABLE:
            return False
        if len(parked.keys) > 1:
            is_requested = any(
                (fetch.assignment, record.offset()) in self.give_ups for fetch, _, record in parked.waiting
            )
            if is_requested:
                self.split(parked)
            return is_requested
        fetch, _, record = parked.waiting[0]
        assignment = fetch.assignment
        request = self.give_ups.pop((assignment, record.offset()), None) if assignment.active else None
        if request is None or not request.outcome.set_running_or_notify_cancel():
            return False
        place = f"{assignment}@{record.offset()}"
        if assignment.tracker.watermark != record.offset():
            request.outcome.set_result(
                f"{place} does not hold its partition: offset {assignment.tracker.watermark} does"
            )
            return False
        self._send(parked, GivenUpError(place, parked.tries, parked.failed_with), request=request)
        return True

    def _send(
        self, parked: ConsumerParked, error: BaseException, *, retry: int | None = None, request: GiveUp | None = None
    ) -> None:
        """Write the head to another topic. Its key waits until a broker has it or refuses it."""
        asked_at = None if request is None else parked.state
        parked.send_out(KeyState.SENDING)

        def settle(state: KeyState, error: BaseException | None = None, why_not: str | None = None) -> None:
            parked.resolve(state, error)
            self._wake(parked)
            if request is not None:
                request.outcome.set_result(why_not)

        self._publisher.publish(
            ExhaustedMessage(parked.waiting[0], error, parked.tries, retry, settle, asked_at=asked_at)
        )

    @staticmethod
    def _complete(item: Item) -> None:
        """Complete the head of a parked key and stop counting it as parked, before the lane's holder sees it."""
        fetch, index, record = item
        fetch.assignment.tracker.complete(fetch.block, (index,))
        # Otherwise it would be subtracted twice from the bytes in flight, and too much would be fetched (I5).
        fetch.assignment.tracker.park(-1, -size_in_bytes(record))
