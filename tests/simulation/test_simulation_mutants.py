"""A simulation finds defects: each of these is planted in the consumer, and found within its seeds."""

# ruff: noqa: ARG005 - what is planted takes the arguments of what it replaces

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from math import inf
from typing import Any, cast

import pytest
from confluent_kafka import KafkaError, KafkaException

from penstock.clients.bounded_calls import Disposable
from penstock.clients.transactional.end_watch import EndWatch
from penstock.consumer.assignments import Assignments, ConsumerRun, size_in_bytes
from penstock.consumer.handlers.ordering import Ordering
from penstock.consumer.lanes.parking import Parking
from penstock.consumer.lanes.processor import LaneProcessor
from penstock.consumer.lanes.slot import ExecutionSlot
from penstock.consumer.outbox import plain_outbox, transactional_outbox
from penstock.consumer.outbox.dead_letters import DeadLetterPublisher, ExhaustedMessage
from penstock.consumer.outbox.outbox import HandlerResults, Submission
from penstock.consumer.outbox.plain_outbox import PlainOutbox
from penstock.consumer.outbox.transaction import Transaction, places_of
from penstock.consumer.outbox.transaction_runner import Faults, Steps, TransactionRunner
from penstock.consumer.outbox.transactional_outbox import TransactionalOutbox
from penstock.consumer.poll.back_pressure import BackPressure
from penstock.consumer.poll.commits import ConsumerCommits
from penstock.consumer.poll.membership import Membership
from penstock.consumer.timers import Timers
from penstock.offsets import CommitPoint, OffsetMap, Tracker
from penstock.routing import KeyState, Scheduler
from penstock.routing.lanes import ParkedKey
from simulation import publishing_varied, varied
from simulation.invariant_checker import InvariantBroken
from simulation.varied import silence, thorough
from support.stepped_workers import SteppedWorker

#: In how many seeds a defect must show.
SEEDS = 400

Plant = Callable[[pytest.MonkeyPatch], None]

pytestmark = thorough


def commits_what_was_fetched(patch: pytest.MonkeyPatch) -> None:
    """The commit point is the position, not the watermark."""
    patch.setattr(Tracker, "commit_point", lambda self, *_: CommitPoint(self.position, ""))


def commits_one_too_many(patch: pytest.MonkeyPatch) -> None:
    """The watermark itself is reported as done while a message is in flight."""
    point = Tracker.commit_point
    patch.setattr(
        Tracker,
        "commit_point",
        lambda self, *limit: CommitPoint(point(self).offset + (self.in_flight > 0), point(self, *limit).metadata),
    )


def gives_up_what_cannot_be_written(patch: pytest.MonkeyPatch) -> None:
    """A dead letter that failed completes its offset."""

    def give_up(self: DeadLetterPublisher, one: ExhaustedMessage, *_: object) -> None:
        fetch, index, _record = one.item
        fetch.assignment.tracker.complete(fetch.block, (index,))
        fetch.assignment.tracker.park(-1, -size_in_bytes(one.record))
        one.settle(KeyState.DONE)

    patch.setattr(DeadLetterPublisher, "_send_again", give_up)


def keeps_handling_what_was_revoked(patch: pytest.MonkeyPatch) -> None:
    """A revocation stops no worker and waits for none."""
    find = Assignments.deactivate

    def deactivate(self: Assignments, partitions: Iterable[tuple[str, int]]) -> list[Any]:
        found = find(self, partitions)
        for one in found:
            one.active = True
        return found

    patch.setattr(Assignments, "deactivate", deactivate)


def does_not_wait_for_handlers(patch: pytest.MonkeyPatch) -> None:
    """A revocation does not wait for the handlers of its partitions."""
    patch.setattr(LaneProcessor, "busy_with", lambda self, slots, assignments: [])


def later(first: int) -> Run:
    """Return a function that runs later seeds: some defects need rare events, which the first seeds do not have."""
    return lambda seed: varied.run(first + seed)


def waits_for_the_first_partition_of_a_batch_only(patch: pytest.MonkeyPatch) -> None:
    """A revocation does not see that a batch has messages of its partition too."""
    patch.setattr(
        ExecutionSlot, "is_at", lambda self, revoked: self.fetch is not None and self.fetch.assignment in revoked
    )


def lets_later_messages_pass(patch: pytest.MonkeyPatch) -> None:
    """New messages of a parked key are not kept behind it."""
    patch.setattr(LaneProcessor, "_next_parked", lambda self, lane, run, place, stop: stop)


def shares_lanes(patch: pytest.MonkeyPatch) -> None:
    """A lane with work is queued while a worker holds it."""
    take, give_back = Scheduler.take, Scheduler.give_back

    def take_and_let_go(self: Scheduler[Any, Any], queue: int, owed_s: float = 0.0) -> Any:
        lane = take(self, queue, owed_s)
        if lane is not None and lane.claim.locked():
            lane.claim.release()
        return lane

    def claimed(lane: Any) -> Any:
        lane.claim.acquire(blocking=False)
        return lane

    def queue(self: Scheduler[Any, Any], lane: Any) -> int:
        # A queue that is emptied by two has no head that the scheduler could rely on; this defect must not show there.
        heapq.heappush(self._ready[lane.queue], lane.number)
        return cast("int", lane.queue)

    patch.setattr(Scheduler, "_push", queue)
    patch.setattr(Scheduler, "take", take_and_let_go)
    patch.setattr(Scheduler, "give_back", lambda self, lane: give_back(self, claimed(lane)))


def takes_what_is_in_the_handler_for_done(patch: pytest.MonkeyPatch) -> None:
    """A slice is reported one message further than it is."""
    place = ExecutionSlot.place_in_run

    def one_further(self: ExecutionSlot, run: ConsumerRun) -> int | None:
        found = place(self, run)
        return None if found is None else found + 1

    patch.setattr(ExecutionSlot, "place_in_run", one_further)


def chooses_lanes_by_chance(patch: pytest.MonkeyPatch) -> None:
    """The messages of one key go to any lane."""
    chance = random.Random(1)  # noqa: S311 - the same defect each time

    def lane_numbers(self: Ordering, topic: str, partition: int, records: Sequence[object], *_: object) -> list[int]:
        return [chance.randrange(self.lanes) for _ in records]

    patch.setattr(Ordering, "lane_numbers", lane_numbers)


def believes_more_than_was_done(patch: pytest.MonkeyPatch) -> None:
    """The former owner's done work counts one offset more."""
    has = OffsetMap.__contains__
    patch.setattr(OffsetMap, "__contains__", lambda self, offset: has(self, offset) or has(self, offset - 1))


def forgets_what_failed_to_be_committed(patch: pytest.MonkeyPatch) -> None:
    """A commit that failed is not made again."""

    def note(self: ConsumerCommits, why: str, partitions: Iterable[Any]) -> None:
        for assignment in self._assignments.all():
            assignment.acknowledged = True

    patch.setattr(ConsumerCommits, "_note_failure", note)


def forgets_to_resume(patch: pytest.MonkeyPatch) -> None:
    """A partition that is paused stays so."""
    set_pause = BackPressure.set_pause
    patch.setattr(
        BackPressure,
        "set_pause",
        lambda self, consumer, assignment, reason: reason and set_pause(self, consumer, assignment, reason),
    )


def loses_timers(patch: pytest.MonkeyPatch) -> None:
    """Some retries are never due."""
    add, chance = Timers.add, random.Random(1)  # noqa: S311 - the same defect each time
    patch.setattr(Timers, "add", lambda self, due, call: add(self, due if chance.random() < 0.7 else inf, call))


def commits_what_was_lost(patch: pytest.MonkeyPatch) -> None:
    """Lost partitions are committed like revoked ones, without waiting for handlers."""
    patch.setattr(Tracker, "watermark", property(lambda self: self.position))
    patch.setattr(Tracker, "_watermark", lambda self: self._position)


def counts_what_is_parked_for_ever(patch: pytest.MonkeyPatch) -> None:
    """A parked message that is done still counts as parked."""
    park = Tracker.park
    patch.setattr(Tracker, "park", lambda self, count, size: park(self, count, size) if count > 0 else None)


def takes_in_without_a_limit(patch: pytest.MonkeyPatch) -> None:
    """Full or not, more is fetched."""
    patch.setattr(BackPressure, "apply", lambda self, consumer, assignments, now: True)


def waits_for_handlers_as_long_as_it_takes(patch: pytest.MonkeyPatch) -> None:
    """A revocation waits far beyond its budget."""
    patch.setattr(Membership, "_left", lambda self, begun: begun + 600.0 - self._clock.monotonic())


# Parking: messages that failed, were put off, or are given up


class _Lenient:
    """A key that goes on while its head is out has that resolved twice."""

    resolve = ParkedKey.resolve

    @classmethod
    def plant(cls, patch: pytest.MonkeyPatch) -> None:
        patch.setattr(ParkedKey, "resolve", lambda self, *how: cls.resolve(self, *how) if self.is_out else None)


def _goes_on(patch: pytest.MonkeyPatch, step: str, as_if: KeyState) -> None:
    take: Callable[..., None] = getattr(Parking, step)

    def go_on(self: Parking, parked: Any, *rest: Any, **more: Any) -> None:
        take(self, parked, *rest, **more)
        if parked.is_out:
            parked.resolve(as_if)
            self._wake(parked)

    _Lenient.plant(patch)
    patch.setattr(Parking, step, go_on)


def goes_on_before_a_completion_comes(patch: pytest.MonkeyPatch) -> None:
    """A parked key is released while the completion of its head is out."""
    _goes_on(patch, "defer_head", KeyState.HANDLED)


def goes_on_before_a_dead_letter_is_written(patch: pytest.MonkeyPatch) -> None:
    """A parked key is released while its head is on the way to another topic."""
    _goes_on(patch, "_send", KeyState.DONE)


def forgets_what_waits_behind_a_head(patch: pytest.MonkeyPatch) -> None:
    """A message that waits behind a parked one goes with it."""
    next_head = ParkedKey.next_head

    def drop_one(self: ParkedKey[Any, Any]) -> None:
        next_head(self)
        if len(self.waiting) > 1:
            self.waiting.popleft()

    patch.setattr(ParkedKey, "next_head", drop_one)


def tries_the_last_that_waits_first(patch: pytest.MonkeyPatch) -> None:
    """Messages behind a parked message come in another order."""
    next_head = ParkedKey.next_head

    def turn(self: ParkedKey[Any, Any]) -> None:
        next_head(self)
        self.waiting.rotate(1)

    patch.setattr(ParkedKey, "next_head", turn)


def _completes_early(patch: pytest.MonkeyPatch, *, is_retry: bool) -> None:
    publish, complete = DeadLetterPublisher.publish, Submission.complete
    early: set[tuple[object, int]] = set()

    def complete_and_publish(self: DeadLetterPublisher, one: ExhaustedMessage) -> None:
        if (one.retry is not None) is is_retry and one.place not in early and one.assignment.active:
            early.add(one.place)
            fetch, index, _ = one.item
            fetch.assignment.tracker.complete(fetch.block, (index,))
        publish(self, one)

    def is_late(one: Submission) -> bool:
        return one.lane is not None or (one.assignment, one.items[0][2].offset()) not in early

    patch.setattr(DeadLetterPublisher, "publish", complete_and_publish)
    patch.setattr(Submission, "complete", lambda self: complete(self) if is_late(self) else None)
    patch.setattr(transactional_outbox, "places_of", lambda inside: places_of(filter(is_late, inside)))


def completes_before_a_dead_letter_is_written(patch: pytest.MonkeyPatch) -> None:
    """The offset of a dead letter is done before its send."""
    _completes_early(patch, is_retry=False)


def completes_before_a_retry_topic_has_it(patch: pytest.MonkeyPatch) -> None:
    """The offset of a message for a retry topic is done before its send."""
    _completes_early(patch, is_retry=True)


def gives_up_what_was_revoked(patch: pytest.MonkeyPatch) -> None:
    """A failure is judged though its partition was revoked meanwhile."""
    judge: Any = Parking.fail_head

    def judge_all(self: Parking, parked: Any, *rest: Any, **more: Any) -> None:
        assignment = parked.waiting[0][0].assignment
        active, assignment.active = assignment.active, True
        judge(self, parked, *rest, **more)
        assignment.active = active

    patch.setattr(Parking, "fail_head", judge_all)


# Time limits: a call that does not return is given up with its worker


def hands_a_key_on_whose_call_goes_on(patch: pytest.MonkeyPatch) -> None:
    """The key of an abandoned call does not wait for its end."""
    patch.setattr(ParkedKey, "is_blocked", property(lambda self: False))


def forgets_the_key_of_an_abandoned_call(patch: pytest.MonkeyPatch) -> None:
    """The return of an abandoned call is not reported."""
    patch.setattr(Future, "add_done_callback", lambda self, call: None)

    def wake_others(self: LaneProcessor, **_: bool) -> None:
        for lane in self.scheduler.lanes:
            self.set_aside.drop_inactive(lane)
            for parked in lane.parked.copy().values():
                if parked.call is None or not parked.waiting or not parked.waiting[0][0].assignment.active:
                    self.wake_waiter(parked)
            for aside in lane.aside.copy().values():
                self.wake_waiter(aside)

    # The end of a run changes rates, which would hide the fault.
    patch.setattr(LaneProcessor, "wake_all", wake_others)


def takes_what_is_abandoned_for_done(patch: pytest.MonkeyPatch) -> None:
    """The message of an abandoned call is done, against its handler's `on_failure`."""
    go_on = SteppedWorker.go_on

    def go_on_as_if_done(self: SteppedWorker, outcome: Any) -> None:
        go_on(self, None if getattr(outcome, "call", None) is not None else outcome)

    patch.setattr(SteppedWorker, "go_on", go_on_as_if_done)


# Planted defects, exactly once


def commits_offsets_of_results_that_are_missing(patch: pytest.MonkeyPatch) -> None:
    """The offsets of messages are committed whose results are not in the transaction."""
    produce = TransactionRunner._run

    def without_one(self: TransactionRunner, transaction: Transaction, *rest: Any) -> None:
        kept, transaction.submissions = transaction.submissions, transaction.submissions[:-1]
        try:
            produce(self, transaction, *rest)
        finally:
            transaction.submissions = kept

    patch.setattr(TransactionRunner, "_run", without_one)


def commits_offsets_before_their_results(patch: pytest.MonkeyPatch) -> None:
    """A message is done when its results are handed over, so that any transaction may commit its offset."""
    submit, done = TransactionalOutbox.submit, set[tuple[Any, int]]()

    def complete(self: TransactionalOutbox, items: Any, messages: Any, then: Any, lane: Any = None) -> None:
        submit(self, items, messages, then, lane)
        for fetch, index, _ in items:
            if (fetch.block, index) not in done:
                done.add((fetch.block, index))
                fetch.assignment.tracker.complete(fetch.block, (index,))

    patch.setattr(TransactionalOutbox, "submit", complete)
    patch.setattr(transactional_outbox, "places_of", lambda inside: {})
    patch.setattr(transactional_outbox, "note_full", lambda *_: False)


def publishes_a_result_twice(patch: pytest.MonkeyPatch) -> None:
    """Committed results are sometimes written again."""
    note, chance = TransactionalOutbox._note_committed, random.Random(1)  # noqa: S311 - the same defect each time
    repeated: set[Submission] = set()

    def once_more(self: TransactionalOutbox, transaction: Transaction) -> None:
        note(self, transaction)
        if transaction.submissions and chance.random() < 0.1:
            repeated.add(transaction.submissions[0])
            self._queue.append(transaction.submissions[0])

    patch.setattr(TransactionalOutbox, "_note_committed", once_more)
    patch.setattr(
        transactional_outbox, "places_of", lambda inside: places_of(one for one in inside if one not in repeated)
    )


def takes_a_doubt_for_aborted(patch: pytest.MonkeyPatch) -> None:
    """A transaction with an unknown end is repeated."""

    def is_settled(self: TransactionalOutbox) -> Steps[bool]:
        doubt, self._doubt = self._doubt, None
        self._put_back(() if doubt is None else doubt.submissions, [])
        yield
        return True

    patch.setattr(TransactionalOutbox, "_settle_doubt", is_settled)


def takes_a_doubt_for_committed(patch: pytest.MonkeyPatch) -> None:
    """A transaction with an unknown end counts as done."""

    def is_settled(self: TransactionalOutbox) -> Steps[bool]:
        doubt, self._doubt = self._doubt, None
        if doubt is not None:
            self._note_committed(doubt)
        yield
        return True

    patch.setattr(TransactionalOutbox, "_settle_doubt", is_settled)


def drops_what_was_aborted(patch: pytest.MonkeyPatch) -> None:
    """The results of a transaction that was aborted are forgotten, and their messages done."""
    note = TransactionalOutbox._note_failed

    def forget(self: TransactionalOutbox, transaction: Transaction | None, error: BaseException) -> None:
        note(self, transaction, error)
        for one in transaction.submissions if transaction is not None and isinstance(error, KafkaException) else ():
            if self._doubt is None and one in self._queue:
                self._queue.remove(one)
                one.complete()

    patch.setattr(TransactionalOutbox, "_note_failed", forget)


def swaps_what_is_done_again(patch: pytest.MonkeyPatch) -> None:
    """Repeated results are written in another order."""
    put_back = TransactionalOutbox._put_back
    patch.setattr(
        TransactionalOutbox, "_put_back", lambda self, taken, inside: put_back(self, list(reversed(taken)), inside)
    )


def puts_what_is_done_again_behind_the_rest(patch: pytest.MonkeyPatch) -> None:
    """Repeated results come after later submissions."""
    put_back = TransactionalOutbox._put_back

    def put_behind(self: TransactionalOutbox, taken: Sequence[Submission], inside: list[Submission]) -> None:
        put_back(self, (), inside)
        self._queue.extend(taken)

    patch.setattr(TransactionalOutbox, "_put_back", put_behind)


def lets_results_pass_what_waits_for_a_silent_topic(patch: pytest.MonkeyPatch) -> None:
    """Results behind a result that waits for its topic go on."""
    take = TransactionalOutbox._take
    nothing = type("Nothing", (set,), {"add": lambda self, lane: None})
    patch.setattr(TransactionalOutbox, "_take", lambda self, aside, _, full: take(self, aside, nothing(), full))


def takes_silence_for_a_refusal(patch: pytest.MonkeyPatch) -> None:
    """A topic that does not answer fails the messages that have results for it."""
    faults = TransactionRunner.faults

    def blame(self: TransactionRunner) -> Faults:
        found = faults(self)
        timed_out = KafkaError(KafkaError._MSG_TIMED_OUT)
        return Faults({**dict.fromkeys(found.silent, timed_out), **found.topics}, found.message)

    patch.setattr(TransactionRunner, "faults", blame)


def believes_every_end(patch: pytest.MonkeyPatch) -> None:
    """An end that was sent twice passes for known."""
    patch.setattr(EndWatch, "doubt", lambda self, took_s: None)


def waits_for_ever_for_a_call(patch: pytest.MonkeyPatch) -> None:
    """A call of the client library that does not return is never abandoned."""
    patch.setattr(Disposable, "has_returned", lambda self, call, *_: call.done())


def writes_dead_letters_without_their_offsets(patch: pytest.MonkeyPatch) -> None:
    """A transaction has a dead letter, and not the offset of its message."""
    patch.setattr(
        transactional_outbox, "places_of", lambda inside: places_of([one for one in inside if one.lane is not None])
    )


def commits_offsets_of_what_waits(patch: pytest.MonkeyPatch) -> None:
    """A transaction commits the offsets of messages whose results are for the next one."""
    take = TransactionalOutbox._next

    def take_more(self: TransactionalOutbox) -> Transaction:
        taken = take(self)
        return replace(taken, positions=self.changed(places_of([*taken.submissions, *self._queue.copy()])))

    patch.setattr(TransactionalOutbox, "_next", take_more)


def publishes_what_the_map_has_no_room_for(patch: pytest.MonkeyPatch) -> None:
    """A result is in a transaction whose offset map was cut before its offset."""
    patch.setattr(transactional_outbox, "note_full", lambda *_: False)


# Planted defects, at least once


def is_done_before_its_results(patch: pytest.MonkeyPatch) -> None:
    """A message is done when its results were sent."""
    send, complete, end = PlainOutbox._send, Submission.complete, HandlerResults._ended
    done: set[Submission] = set()

    def sent(self: PlainOutbox, clients: Any, one: Submission, message: Any) -> bool:
        taken = send(self, clients, one, message)
        if taken and one.left and one.sent == len(one.messages) and one.lane is not None:
            one.complete()
        return taken

    def complete_once(one: Submission) -> None:
        if one not in done:
            done.add(one)
            complete(one)

    def end_once(self: HandlerResults, one: Submission, tries: Any = None) -> None:
        if one not in done or one.is_written:
            end(self, one, tries)

    patch.setattr(PlainOutbox, "_send", sent)
    patch.setattr(Submission, "complete", complete_once)
    patch.setattr(HandlerResults, "_ended", end_once)


def takes_the_results_of_a_slice_for_written(patch: pytest.MonkeyPatch) -> None:
    """Messages of a slice that have results are done with the others of it."""

    def drop(self: ExecutionSlot, run: Any, first: int, stop: int) -> list[int]:
        self.results.clear()
        return cast("list[int]", run.indexes[first:stop])

    patch.setattr(ExecutionSlot, "_submit_results", drop)


def forgets_a_refusal(patch: pytest.MonkeyPatch) -> None:
    """A refused message counts as done."""
    end = HandlerResults._ended

    def forget(self: HandlerResults, one: Submission, tries: Any = None) -> None:
        if one.refusal is not None:
            one.complete()
        else:
            end(self, one, tries)

    patch.setattr(HandlerResults, "_ended", forget)


def sends_the_newest_first(patch: pytest.MonkeyPatch) -> None:
    """Results are not sent in the order in which they were handed over."""
    submit = PlainOutbox.submit

    def submit_first(self: PlainOutbox, *what: Any) -> None:
        submit(self, *what)
        self._queue.rotate(1)

    patch.setattr(PlainOutbox, "submit", submit_first)


def loses_what_a_failed_producer_had(patch: pytest.MonkeyPatch) -> None:
    """The messages of a producer with a fatal failure count as written."""

    def pass_for_written(self: PlainOutbox, one: Submission, topic: str, error: Any, _: object) -> None:
        self._unreported -= 1
        is_lost = error is not None and (error.fatal() or error.code() in plain_outbox._NO_FAULT)
        self._answered(one, topic, None if is_lost else error)

    patch.setattr(PlainOutbox, "_delivered", pass_for_written)


Run = Callable[[int], object]
EXACTLY_ONCE = partial(publishing_varied.run, exactly_once=True)
AT_LEAST_ONCE = partial(publishing_varied.run, exactly_once=False)

#: What is planted, the runs that must find it, and what they say.
PLANTS: list[tuple[Plant, Run, str]] = [
    (commits_what_was_fetched, varied.run, "I3"),
    (commits_one_too_many, varied.run, "I3"),
    (gives_up_what_cannot_be_written, varied.run, "I3|I2|not done"),
    (keeps_handling_what_was_revoked, varied.run, "I|began|gave"),
    (does_not_wait_for_handlers, varied.run, "gave"),
    (waits_for_the_first_partition_of_a_batch_only, later(1_000), "gave"),
    (lets_later_messages_pass, varied.run, "I2|I4"),
    (takes_what_is_in_the_handler_for_done, varied.run, "I3|I4"),
    (shares_lanes, varied.run, "I1|I2|I4"),
    (chooses_lanes_by_chance, varied.run, "I1|I2"),
    (believes_more_than_was_done, varied.run, "not done|I2|I3"),
    (forgets_what_failed_to_be_committed, later(1_000), "committed"),
    (forgets_to_resume, varied.run, "not done"),
    (loses_timers, varied.run, "not done"),
    (commits_what_was_lost, varied.run, "I3"),
    (counts_what_is_parked_for_ever, varied.run, "I4"),
    (takes_in_without_a_limit, varied.run, "I5"),
    (waits_for_handlers_as_long_as_it_takes, varied.run, "I6|gave"),
    (goes_on_before_a_completion_comes, varied.run, "I4|I2"),
    (goes_on_before_a_dead_letter_is_written, varied.run, "I4|I2"),
    (forgets_what_waits_behind_a_head, varied.run, "I4|not done"),
    (tries_the_last_that_waits_first, varied.run, "I2"),
    (completes_before_a_dead_letter_is_written, varied.run, "I3|I4"),
    (completes_before_a_retry_topic_has_it, EXACTLY_ONCE, "I3|I4"),
    (gives_up_what_was_revoked, varied.run, "gave"),
    (hands_a_key_on_whose_call_goes_on, varied.run, "I1"),
    (forgets_the_key_of_an_abandoned_call, varied.run, "not done"),
    (takes_what_is_abandoned_for_done, varied.run, "I3|I4"),
    (commits_offsets_of_results_that_are_missing, EXACTLY_ONCE, "I3"),
    (commits_offsets_before_their_results, EXACTLY_ONCE, "I3|I4|E"),
    (publishes_a_result_twice, EXACTLY_ONCE, "E1"),
    (takes_a_doubt_for_aborted, EXACTLY_ONCE, "E1|I3"),
    (takes_a_doubt_for_committed, EXACTLY_ONCE, "I3|I4|I2|not done|E"),
    (drops_what_was_aborted, EXACTLY_ONCE, "I3|I4|not done"),
    (swaps_what_is_done_again, EXACTLY_ONCE, "E5"),
    (puts_what_is_done_again_behind_the_rest, EXACTLY_ONCE, "E5"),
    (lets_results_pass_what_waits_for_a_silent_topic, EXACTLY_ONCE, "E5"),
    (takes_silence_for_a_refusal, EXACTLY_ONCE, "E5|I3|not done"),
    (believes_every_end, EXACTLY_ONCE, "E2|E3|E1|I3"),
    (waits_for_ever_for_a_call, EXACTLY_ONCE, "not done|gave"),
    (writes_dead_letters_without_their_offsets, EXACTLY_ONCE, "E3|not done"),
    (commits_offsets_of_what_waits, EXACTLY_ONCE, "I3"),
    (publishes_what_the_map_has_no_room_for, EXACTLY_ONCE, "E3"),
    (forgets_a_refusal, EXACTLY_ONCE, "I3"),
    (is_done_before_its_results, AT_LEAST_ONCE, "I3|I4|not done"),
    (takes_the_results_of_a_slice_for_written, AT_LEAST_ONCE, "I3|not done"),
    (forgets_a_refusal, AT_LEAST_ONCE, "I3|not done"),
    (sends_the_newest_first, AT_LEAST_ONCE, "E5"),
    (loses_what_a_failed_producer_had, AT_LEAST_ONCE, "I2|I3"),
]


def run_all(run: Run) -> None:
    """Run the seeds until one fails."""
    for seed in range(SEEDS):
        run(seed)


@pytest.mark.parametrize(("plant", "run", "what"), PLANTS, ids=lambda one: getattr(one, "__name__", ""))
def test_a_planted_defect_is_found(plant: Plant, run: Run, what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)

    with silence(), pytest.raises(InvariantBroken, match=rf"^[^\n]*({what})") as found:
        run_all(run)

    assert any("PENSTOCK_SIMULATION_SEED=" in note for note in found.value.__notes__)
