"""Which message of a task is handled next: the order of keys, retries and what becomes of exhausted messages.

Pure: rows, the time and the sender of dead letters are given, and nothing here waits or calls a handler. A driver
(`runners`) asks for the next call, has it handled and says what came of it, for one call after the other or for many at
once. A task has its rows to itself, so there is no rebalance, no commit and no lock, unlike in the consumer's lanes.
"""

from __future__ import annotations

import heapq
import logging
import traceback
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Final

from penstock.consumer.execution.lanes.batches import failures
from penstock.consumer.handlers.options.handler_options import OnFailure
from penstock.consumer.handlers.options.ordering import Order
from penstock.consumer.handlers.results import Results
from penstock.consumer.handlers.route import Failed, Route
from penstock.errors import PenstockError, SinkError
from penstock.message import Message, Record
from penstock.spark_sink.sinks.handlers.execution.report import Counts

_log = logging.getLogger("penstock.handler_sink")

#: Bytes that a waiting message takes beside its value, about.
_OVERHEAD_BYTES = 500

#: Gives a message up for good: the record, its route, what its last try raised, and how often it was tried.
GiveUp = Callable[[Record, Route, BaseException, int], None]

#: What came of a call: a failure, what is to be published, or None.
Outcome = Failed | Results | None


@dataclass(slots=True, eq=False)
class HandlerCall:
    """What is given to a handler in one call: a message, or a list of them where it takes batches.

    Beside it stand the identity and the record of each, in order, and when it was handed out. It is not changed; to
    enforce that would take longer than all else that is done for a message.
    """

    route: Route
    items: list[tuple[Hashable, Record]] = field(repr=False)
    work: Message | list[Message]
    begun: float


#: Takes what is to be published of a call that is done; returns how many messages that is.
TakeResults = Callable[[HandlerCall, Results], int]


def refuse_results(call: HandlerCall, _results: Results) -> int:
    """Refuse what a handler returned, where the sink publishes nothing."""
    raise SinkError(
        f"{call.route.handler.name} returned messages, and this HandlerSink has no name under which it could remember "
        "what it has published; give it name=... (and bootstrap_servers), or return None"
    )


class _KeyQueue:
    """The messages of one identity that wait, the first of them for its time or for one that is being handled."""

    __slots__ = ("attempts", "since", "waiting")

    def __init__(self) -> None:
        self.waiting: deque[Record] = deque()
        #: How often the first was tried, and since when.
        self.attempts = 0
        self.since = 0.0


#: Stands for the queue of an identity that is being handled and behind which nothing waits: the usual case, made cheap.
_NONE_WAITING: Final = _KeyQueue()


class KeyQueues:
    """The messages of a task. One thread calls it.

    Messages of one identity go one at a time and in the order of the rows; with batches, one batch at a time. A failed
    message waits for its retry with those behind it and delays no other, until as many wait as may: no row is taken in
    while `max_parked` messages wait, or values of `max_parked_bytes`. Those that failed in a call under way come on
    top. `give_up` gets a message whose retries are exhausted, to be written as a dead letter or dropped, and
    `take_results` what is to be published of a call, when it is done.
    """

    def __init__(
        self,
        records: Iterator[Record],
        routes: Mapping[str, Route],
        give_up: GiveUp,
        *,
        max_parked: int,
        max_parked_bytes: int,
        take_results: TakeResults = refuse_results,
    ) -> None:
        self._records = records
        self._routes = routes
        #: Of the topics whose messages may be handled as they come, one by one, while none waits: see `undisturbed`.
        self._simple = {topic: one for topic, one in routes.items() if _is_simple(one)}
        self._give_up = give_up
        self._take_results = take_results
        self._max_parked = max_parked
        self._max_parked_bytes = max_parked_bytes
        self._queues: dict[Hashable, _KeyQueue] = {}
        #: Identities whose first message may be tried at once, and those whose has a time.
        self._ready: deque[Hashable] = deque()
        self._due: list[tuple[float, int, Hashable]] = []
        self._numbers = count()
        #: A batch that is not full yet, of one topic at a time; and the row that must come after it.
        self._batch: list[tuple[Hashable, Record, Message]] = []
        self._batch_keys: set[Hashable] = set()
        self._batch_route: Route | None = None
        self._held: Record | None = None
        self.counts = Counts()
        #: Messages that wait, and their bytes: to look at.
        self.parked = 0
        self.parked_bytes = 0

    def undisturbed(self) -> Iterator[tuple[Route, Record, Message]]:
        """Hand out rows while nothing waits, each with its route and its message: quicker than a call for each.

        Whoever takes the next has handled the one before. Of one that was not done, or returned something, `call_of`
        makes a call, and the iterator is used no more. It ends where rows do, and before one that takes more than to be
        handled: then `next` goes on.
        """
        counts, simple, records = self.counts, self._simple, self._records
        while not (self._queues or self._batch or self._held is not None):
            record = next(records, None)
            if record is None:
                return
            counts.rows += 1
            route = simple.get(record.topic())
            if route is None:
                self._held = record
                return
            message = route.message(record)
            if isinstance(message, Failed):
                self._held = record  # `next` finds it anew
                return
            yield route, record, message
            counts.handled += 1

    def call_of(self, route: Route, record: Record, message: Message, begun: float) -> HandlerCall:
        """Return the call of a row that `undisturbed` handed out at a time, to be completed."""
        key = route.ordering.identity(record)
        self._queues[key] = _NONE_WAITING
        return HandlerCall(route, [(key, record)], message, begun)

    def next(self, now: float) -> HandlerCall | None:
        """Return what may be handled now, or None: then ask again when a call was completed, or at `next_due`.

        Raises `SinkError` where a message failed for good whose handler stops then; the task must fail.
        """
        while self._ready or (self._due and self._due[0][0] <= now):
            key = self._ready.popleft() if self._ready else heapq.heappop(self._due)[2]
            call = self._head(key, now)
            if call is not None:
                return call
        while self.parked < self._max_parked and self.parked_bytes < self._max_parked_bytes:
            record, self._held = self._held, None
            if record is None:
                record = next(self._records, None)
                if record is None:
                    break
                self.counts.rows += 1
            call = self._fresh(record, now)
            if call is not None:
                return call
        # Nothing more can join it now.
        return self._begin_batch(now) if self._batch else None

    def next_due(self) -> float | None:
        """Return when the next message may be tried that waits for its time, or None."""
        return self._due[0][0] if self._due else None

    def complete(self, call: HandlerCall, outcome: Outcome, now: float) -> None:
        """Complete a call: with its failure, or all of it done with its results or None. Raises as `next` does."""
        if outcome is None or not isinstance(outcome, Failed):
            if outcome is not None:
                self.counts.results += self._take_results(call, outcome)
            self.counts.handled += len(call.items)
            if len(call.items) == 1:
                self._release(call.items[0][0])
                return
            for key in {key for key, _ in call.items}:
                self._release(key)
            return
        batched = failures(outcome, len(call.items)) if call.route.batch > 1 else {0: outcome}
        back: dict[Hashable, tuple[Failed, list[Record]]] = {}
        for place, (key, record) in enumerate(call.items):
            if key in back:
                # Behind one of its key that failed: it comes again whatever became of it, so that the order holds.
                back[key][1].append(record)
            elif place in batched:
                back[key] = (batched[place], [record])
            else:
                self.counts.handled += 1
        for key in dict.fromkeys(key for key, _ in call.items):
            if key in back:
                failure, records = back[key]
                self._requeue(key, records, failure, call, now)
            else:
                self._release(key)

    def _fresh(self, record: Record, now: float) -> HandlerCall | None:  # noqa: PLR0911 - one for each way that a row can go
        """Take in a row: a call of it, or None where it is done with, or waits."""
        route = self._routes[record.topic()]
        if self._batch and route is not self._batch_route:
            self._held = record
            return self._begin_batch(now)
        failure = None
        if route.handler.filter is not None:
            passes = route.screen(record)
            if not passes:
                self.counts.filtered += 1
                return None
            failure = passes if isinstance(passes, Failed) else None
        try:
            key = route.ordering.identity(record)
        except PenstockError as error:
            key, failure = (record.topic(), record.partition(), record.offset()), Failed(error, permanent=True)
        queue = self._queues.get(key)
        if queue is not None:
            if queue is _NONE_WAITING:
                queue = self._queues[key] = _KeyQueue()
            self._park(queue, record)
            return None
        message = failure or route.message(record)
        if isinstance(message, Failed):
            if key in self._batch_keys:
                # Those of its key in the batch come first, should they fail.
                self._held = record
                return self._begin_batch(now)
            queue = self._queues[key] = _KeyQueue()
            queue.since = now
            self._park(queue, record)
            self._failed(key, queue, message, now)
            return None
        if route.batch == 1:
            self._queues[key] = _NONE_WAITING
            return HandlerCall(route, [(key, record)], message, now)
        self._batch.append((key, record, message))
        self._batch_keys.add(key)
        self._batch_route = route
        return self._begin_batch(now) if len(self._batch) >= route.batch else None

    def _begin_batch(self, now: float) -> HandlerCall:
        gathered, self._batch = self._batch, []
        route, self._batch_route = self._batch_route, None
        if route is None:
            raise AssertionError("a batch was handed out that nobody had begun")
        self._queues.update(dict.fromkeys(self._batch_keys, _NONE_WAITING))
        self._batch_keys.clear()
        items = [(key, record) for key, record, _ in gathered]
        return HandlerCall(route, items, [message for _, _, message in gathered], now)

    def _head(self, key: Hashable, now: float) -> HandlerCall | None:
        """Return a call of what stands first in a queue, or None where that was done with, or failed again."""
        queue = self._queues[key]
        while queue.waiting:
            record = queue.waiting[0]
            route = self._routes[record.topic()]
            # At each try: the failure may have been the filter's own, and then nothing has let the message pass yet.
            passes = route.screen(record)
            if not passes:
                self.counts.filtered += 1
                self._unpark(queue)
                queue.attempts = 0
                continue
            answer = passes if isinstance(passes, Failed) else route.message(record, queue.attempts)
            if queue.attempts == 0:
                queue.since = now
            else:
                self.counts.retried += 1
            if isinstance(answer, Failed):
                self._failed(key, queue, answer, now)
                return None
            self._unpark(queue)
            return self._call_of(key, queue, route, record, answer, now)
        del self._queues[key]
        return None

    def _call_of(  # noqa: PLR0917 - what was found out of the head, to be joined by those behind it
        self, key: Hashable, queue: _KeyQueue, route: Route, record: Record, message: Message, now: float
    ) -> HandlerCall:
        """Return a call of a head; with batches and at a first try, of those behind it too."""
        if route.batch == 1:
            return HandlerCall(route, [(key, record)], message, now)
        items, work = [(key, record)], [message]
        while queue.attempts == 0 and queue.waiting and len(items) < route.batch:
            behind = queue.waiting[0]
            if self._routes[behind.topic()] is not route or route.screen(behind) is not True:
                break
            answer = route.message(behind)
            if isinstance(answer, Failed):
                break
            self._unpark(queue)
            items.append((key, behind))
            work.append(answer)
        return HandlerCall(route, items, work, now)

    def _release(self, key: Hashable) -> None:
        """Make ready what waits behind messages that are done."""
        queue = self._queues[key]
        if queue is _NONE_WAITING or not queue.waiting:
            del self._queues[key]
            return
        queue.attempts = 0
        self._ready.append(key)

    def _requeue(self, key: Hashable, records: list[Record], failure: Failed, call: HandlerCall, now: float) -> None:
        """Put back to the front what failed of a call, with what was behind it."""
        queue = self._queues[key]
        if queue is _NONE_WAITING:
            queue = self._queues[key] = _KeyQueue()
        if queue.attempts == 0:
            queue.since = call.begun
        for record in reversed(records):
            self._park(queue, record, first=True)
        self._failed(key, queue, failure, now)

    def _failed(self, key: Hashable, queue: _KeyQueue, failure: Failed, now: float) -> None:
        """Decide what becomes of the failed head of a queue: it waits for its retry, or is given up."""
        record = queue.waiting[0]
        route = self._routes[record.topic()]
        handler, error = route.handler, failure.error
        self.counts.failed += 1
        queue.attempts += 1
        place = f"{record.topic()}[{record.partition()}]@{record.offset()}"
        if not failure.permanent:
            try:
                delay = route.retry.delay_after(queue.attempts, now - queue.since, error)
            except Exception as defect:  # noqa: BLE001 - a policy of the user's may raise anything
                raise SinkError(
                    f"the retry policy of {handler.name} failed with {raised_where(defect)} when it was asked about "
                    f"{place}; the batch comes again: mend the policy"
                ) from None  # as below
            if delay is not None:
                heapq.heappush(self._due, (now + delay, next(self._numbers), key))
                return
        tries, queue.attempts = queue.attempts, 0
        if handler.on_failure is OnFailure.STOP:
            _log.debug("%s failed %s", handler.name, place, exc_info=error)
            # Not chained: Spark writes stacks of tasks into logs and events, and their texts may hold the message.
            raise SinkError(
                f"{handler.name} failed {place} {tries} times, last with {raised_where(error)}; the query ends and "
                "the batch comes again: mend the handler, or choose on_failure='dead_letter' or 'drop'"
            ) from None
        self._give_up(record, route, error, tries)
        if handler.on_failure is OnFailure.DEAD_LETTER:
            self.counts.dead_letters += 1
        else:
            _log.error(
                "%s was dropped: %s failed it %d times, last with %s", place, handler.name, tries, type(error).__name__
            )
            self.counts.dropped += 1
        self._unpark(queue)
        if queue.waiting:
            self._ready.append(key)
        else:
            del self._queues[key]

    def _park(self, queue: _KeyQueue, record: Record, *, first: bool = False) -> None:
        if first:
            queue.waiting.appendleft(record)
        else:
            queue.waiting.append(record)
        self.parked += 1
        self.parked_bytes += len(record) + _OVERHEAD_BYTES

    def _unpark(self, queue: _KeyQueue) -> None:
        record = queue.waiting.popleft()
        self.parked -= 1
        self.parked_bytes -= len(record) + _OVERHEAD_BYTES


def _is_simple(route: Route) -> bool:
    """Tell whether messages are single, and neither a filter nor a function for their keys is asked, which may fail."""
    one = route.handler
    return route.batch == 1 and one.filter is None and (one.key is None or one.order is not Order.KEY)


def raised_where(error: BaseException) -> str:
    """Return the kind of an exception and the place in the code that raised it, without its text."""
    stack = traceback.extract_tb(error.__traceback__)
    if not stack:
        return type(error).__name__
    return f"{type(error).__name__} ({Path(stack[-1].filename).name} line {stack[-1].lineno}, {stack[-1].name})"
