"""The transactional outbox: submissions and the offsets they are for, in one Kafka transaction; readers see each once.

It takes what has come together since the last transaction (`interval_s`), writes it, adds the group's offsets of
exactly those messages that are done with it, with the offset map, and commits. Handlers go on meanwhile, and what they
return waits for the next one.

What was in a transaction that was aborted is written again, from the messages at hand, before anything else: no handler
is called for it. One in doubt is settled first: a successor under the same id has ended it, so that the group's
committed offsets tell whether it was committed. Offsets are done in their trackers once the transaction is committed;
its positions are taken from the trackers as if they were. A submission goes in only with its offset: one that the
offset map has no room for waits, with what is above it in its partition.

A transaction that fails for what is in it is *split*: the next has half of it, so that the one submission which a
broker refuses, or which is too large to be delivered in time, is alone in the end; then it is refused. Topics that do
not answer are *silent*: what is for them waits, with what is behind it in its lane, and one submission is tried alone
now and then; the others go on.

Fencing is by the group's generation: positions of a member that was put out are refused, so a zombie's results never
become visible. The next owner of a partition asks for stable offsets, and so waits for a transaction that is open.

The poll thread puts transactions together and acts on their ends; the calls that one takes are made on a thread that
can be abandoned (`TransactionRunner`). So no rebalance comes between the group's generation and the positions that are
committed as of it. `_main` reads as if it waited: it is a generator, which `serve` lets go on.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from confluent_kafka import KafkaError, KafkaException

from penstock.clients.bounded_calls import NotAnsweredError
from penstock.clients.cluster import Clock, Cluster
from penstock.clients.kafka_errors import code_of, concerns_a_group, is_rebalancing, reason
from penstock.clients.ration import once_in, rationed
from penstock.clients.transactional.end_watch import SURE_S, UnknownEndError
from penstock.clients.transactional.faults import GivenUpError, IdLostError, NotOpenedError
from penstock.consumer.assignments import Assignment, Assignments, ConsumerLane
from penstock.consumer.outbox.outbox import Outbox, Submission
from penstock.consumer.outbox.transaction import Full, Places, Transaction, has_no_room, note_full, places_of
from penstock.consumer.outbox.transaction_runner import Steps, TooSlowError, TransactionRunner
from penstock.offsets import MAX_METADATA_CHARS, CommitPoint

_log = rationed(__name__)

#: What a transaction fails with, besides what the client library raises.
_FAILURES = (TooSlowError, GivenUpError, NotAnsweredError, UnknownEndError, NotOpenedError, IdLostError)
#: Seconds between two tries of what failed for no message's fault.
_RETRY_DELAY_S = 0.2
#: Seconds that an answer may take which says that a transaction in doubt was not committed.
_DOUBT_ANSWER_S = 1.0
#: Seconds between two log lines about failures of one kind.
_LOG_AGAIN_S = 10.0
#: Seconds between two looks whether a call has returned.
_CALL_POLL_S = 0.005
#: Submissions in one transaction, and their bytes, at most.
_MOST = 20_000
_MOST_BYTES = 32 * 1024 * 1024
#: Submissions that are sent without waiting for more.
_FULL = 5_000
#: Bytes below which one submission alone is not to blame for a transaction that takes too long.
_LARGE_BYTES = 1024 * 1024
#: Seconds before a silent topic is tried again; how many brokers that are well may take for it is the runner's to know.
_SILENT_TOPIC_RETRY_S = 5.0


class TransactionalOutbox(Outbox):
    """Sends in Kafka transactions, exactly once.

    Args:
        interval_s: seconds between the beginnings of two transactions, at least.
        assignments: of which positions are committed.
        complete_finished: completes what handlers finished of the runs that they are still at.
    """

    _runner: TransactionRunner

    def __init__(
        self,
        group: str,
        interval_s: float,
        clock: Clock,
        *,
        assignments: Assignments,
        complete_finished: Callable[[], None],
    ) -> None:
        super().__init__()
        self._group = group
        self._interval_s = interval_s
        self._clock = clock
        self._assignments = assignments
        self._complete_finished = complete_finished
        #: Returns the group's metadata, in which positions are committed; None while this member has no id.
        self.generation: Callable[[], Any] = lambda: None
        #: Takes the error of a group that refuses positions for want of a right.
        self.note_refusal: Callable[[KafkaError], object] = lambda _: None
        self._began_at = 0.0
        # Until when a failure is not tried again.
        self._again_at = 0.0
        self._is_expedited = False
        # How many of the queue the last transaction put back: they wait for a topic, or for room in the offset map.
        self._kept = 0
        # The transaction in doubt, and when the group's offsets did not have it for the first time.
        self._doubt: Transaction | None = None
        self._denied_at: float | None = None
        # Characters of an offset map, at most.
        self._map_chars = MAX_METADATA_CHARS
        # Submissions of a transaction, at most, and the one that was alone in the last, which took too long.
        self._most = _MOST
        self._slow: Submission | None = None
        # Topics that did not answer, each with the time until which nothing is written there.
        self._silent: dict[str, float] = {}
        # Whether the transaction under way is one submission for such a topic.
        self._is_trial = False
        #: Transactions that were committed.
        self.transactions = 0
        #: Whether it has failed for ever, and the consumer stops: nothing is sent any more.
        self.has_failed = False
        self._steps = self._main()

    def connect(self, cluster: Cluster, config: Mapping[str, Any]) -> None:
        """As `Outbox` says; the first transaction connects."""
        self._runner = TransactionRunner(f"penstock-outbox-{self._group}", self._group, cluster, config)

    def serve(self) -> None:
        """Begin a transaction that is due, or act on the end of the one under way. What it raises ends the consumer."""
        if self.has_failed:
            return
        try:
            next(self._steps)
        except:
            self.has_failed = True
            raise

    def submissions(self) -> list[Submission]:
        """As `Outbox` says; none where nothing is sent any more, for nothing is to be waited for then."""
        return [] if self.has_failed else super().submissions()

    def due_in(self) -> float:
        """As `Outbox` says."""
        return _CALL_POLL_S if self._runner.is_calling else max(0.0, self._due_at - self._clock.monotonic())

    def expedite(self) -> None:
        """Begin the next transaction at once."""
        self._is_expedited = True

    def close(self) -> None:
        """As `Outbox` says."""
        self._runner.close()

    def changed(self, done: Mapping[Assignment, Places] = MappingProxyType({})) -> dict[Assignment, CommitPoint]:
        """Return what is to be committed once these places are done; only what the group does not have."""
        self._complete_finished()
        found = {}
        for assignment in self._assignments.all():
            if assignment.known:
                point = assignment.tracker.commit_point(self._map_chars, with_done=done.get(assignment, {}))
                if point != assignment.committed or not assignment.acknowledged:
                    found[assignment] = point
        return found

    @property
    def _due_at(self) -> float:
        """When the next transaction begins, on the engine's clock."""
        return self._again_at if self._is_expedited else max(self._again_at, self._began_at + self._interval_s)

    def _main(self) -> Steps[None]:
        while True:
            if len(self._queue) - self._kept >= _FULL:
                self.expedite()
            # The next follows at once on one that was committed, where it is due by then.
            if self._clock.monotonic() < self._due_at or not (yield from self._transact()):
                yield

    def _transact(self) -> Steps[bool]:
        """Run one transaction with what has come together; tell whether it was committed."""
        self._is_expedited, self._began_at = False, self._clock.monotonic()
        transaction: Transaction | None = None
        try:
            yield from self._runner.require_open()
            if not (yield from self._is_settled()):
                self._again_at = self._clock.monotonic() + SURE_S
                return False
            metadata = self.generation()
            if metadata is None:
                self._again_at = self._clock.monotonic() + _RETRY_DELAY_S
                return False
            transaction = self._next()
            if transaction.inside or transaction.positions:
                yield from self._runner.run(transaction, metadata, is_trial=self._is_trial)
                self._note_committed(transaction)
                return True
        except (*_FAILURES, KafkaException, BufferError) as error:
            self._note_failed(transaction, error)
        return False

    def _next(self) -> Transaction:
        """Return the next transaction: what is first in the queue, may go, and has its offset in the positions."""
        aside: list[Submission] = []
        lanes: set[ConsumerLane] = set()
        full: Full = {}
        while True:
            inside, kept = self._take(aside, lanes, full)
            positions = self.changed(places := places_of(inside))
            while note_full(full, places, positions):
                # In front of what was kept, which is behind it where both are of one key.
                kept = [*(submission for submission in inside if has_no_room(full, submission)), *kept]
                inside = [submission for submission in inside if not has_no_room(full, submission)]
                positions = self.changed(places := places_of(inside))
            aside += kept
            # What has no room gets it from what is below it, which may stand behind it in the queue.
            if inside or not kept:
                self._kept = len(aside)
                self._put_back(aside, inside)
                return Transaction(inside, places, positions)

    def _take(
        self, aside: Sequence[Submission], lanes: set[ConsumerLane], full: Full
    ) -> tuple[list[Submission], list[Submission]]:
        """Take from the queue what may be in one transaction; and what is to be kept.

        That is for silent topics, or behind such in one of these lanes, or waits for room. What was put aside before
        stays so.
        """
        inside: list[Submission] = []
        gone: list[Submission] = []
        kept: list[Submission] = []
        keeps, now, size_bytes = bool(self._silent or full), self._clock.monotonic(), 0
        self._is_trial = False
        queue, most = self._queue, self._most
        while queue and len(inside) < most and not self._is_trial:
            submission = queue[0]
            # Until when nothing is written to one of its topics; 0 where none of them is silent.
            until = max([0.0, *(self._silent.get(to.topic, 0.0) for to in submission.messages)]) if keeps else 0.0
            is_silent = keeps and (until > now or submission.lane in lanes)
            is_kept = is_silent or (keeps and has_no_room(full, submission))
            # One of a topic that was silent is tried alone: it would fail all others.
            if inside and not is_kept and (until or size_bytes + submission.size_bytes > _MOST_BYTES):
                break
            queue.popleft()
            if submission.assignment.is_gone:
                gone.append(submission)
            elif is_kept:
                kept.append(submission)
                if is_silent and submission.lane is not None:
                    lanes.add(submission.lane)
            else:
                inside.append(submission)
                size_bytes += submission.size_bytes
                self._is_trial = until > 0
        self._under_way = [*aside, *inside, *kept]
        for submission in gone:
            submission.end(is_written=False)
        return inside, kept

    def _put_back(self, submissions: Sequence[Submission], inside: list[Submission]) -> None:
        """Put submissions back to where they were taken from; `inside` is what is left of the transaction."""
        self._queue.extendleft(reversed(submissions))
        self._under_way = inside

    def _is_settled(self) -> Steps[bool]:
        """Find out whether the transaction in doubt was committed: its successor under the same id has ended it.

        That it was not is believed when it is answered at once, and again some seconds later: a broker that stood still
        tells what was, until it hears that another coordinates the group now. False: ask again.
        """
        if (doubt := self._doubt) is None:
            return True
        begun = self._clock.monotonic()
        # A partition that is gone may have been moved on by its next owner.
        ours = {
            assignment: sent
            for assignment, sent in doubt.positions.items()
            if not assignment.is_gone and sent != assignment.committed
        }
        found = (yield from self._runner.committed(list(ours))) if ours else {}
        # It took effect whole or not at all.
        if any(found.get(assignment) == sent for assignment, sent in ours.items()):
            self._doubt = None
            self._note_committed(doubt)
            return True
        now = self._clock.monotonic()
        if ours and (self._denied_at is None or now - begun > _DOUBT_ANSWER_S or now < self._denied_at + SURE_S):
            self._denied_at = now if self._denied_at is None else self._denied_at
            return False
        self._doubt = None
        self._put_back(doubt.inside, [])
        return True

    def _note_committed(self, transaction: Transaction) -> None:
        for assignment, blocks in transaction.places.items():
            for block, indexes in blocks.items():
                assignment.tracker.complete(block, indexes)
        for assignment, point in transaction.positions.items():
            assignment.committed, assignment.acknowledged = point, True
        self.transactions += 1
        self._most, self._slow = min(2 * self._most, _MOST), None
        for submission in transaction.inside:
            for message in submission.messages if self._silent else ():
                self._silent.pop(message.topic, None)
            submission.end(is_written=True)
        self._under_way = []

    def _note_failed(self, transaction: Transaction | None, error: BaseException) -> None:
        """Leave what was in it to be done again, without what the broker refused."""
        self._again_at = self._clock.monotonic() + _RETRY_DELAY_S
        is_lost = isinstance(error, IdLostError)
        # What is abandoned in its end may return, and be committed, until a successor has taken its id.
        if transaction is not None and isinstance(error, UnknownEndError | NotAnsweredError):
            self._doubt, self._denied_at = transaction, None
        elif transaction is not None:
            is_lost = self._judge(transaction.inside, error)
        self._runner.discard(abort=self._doubt is None, is_lost=is_lost)
        if concerns_a_group(error):
            self.note_refusal(error.args[0])
        if code_of(error) == KafkaError.OFFSET_METADATA_TOO_LARGE:
            self._leave_maps_out()
        _log.log(
            logging.INFO if is_rebalancing(error) else logging.WARNING,
            "a Kafka transaction of group %s was not committed: %s; %s",
            self._group,
            reason(error),
            "the group's offsets will tell" if self._doubt is not None else "it is repeated with the same results",
            # The same now and then only, for it is tried again at once.
            extra=once_in(_LOG_AGAIN_S, (self._group, code_of(error) or type(error)), self._clock.monotonic()),
        )

    def _leave_maps_out(self) -> None:
        """Commit again at once, and from now on, without maps: the broker does not take one."""
        self._again_at = 0.0
        self.expedite()
        if not self._map_chars:
            return
        self._map_chars = 0
        _log.warning(
            "the broker refuses commit metadata of less than 4,096 characters, which says what is done above the "
            "committed offset; from now on group %s publishes the results of a partition in the order of its offsets, "
            "so a message that is retried holds back those behind it; set offset.metadata.max.bytes to 4096 on the "
            "brokers, and start again",
            self._group,
        )

    def _judge(self, inside: Sequence[Submission], error: BaseException) -> bool:
        """Refuse what brokers find fault with, split where that is not known, and leave the rest to be done again.

        Returns whether topics are silent: a broker may not be able to end the transaction there.
        """
        faults = self._runner.faults()
        refused = {
            submission: (message.topic, faults.topics[message.topic])
            for submission in inside
            for message in submission.messages
            if message.topic in faults.topics
        }
        # One of these is to blame; which, nobody knows.
        suspects, why = list[Submission](), faults.message
        if not refused and why is not None:
            topic = why[0]
            suspects = [submission for submission in inside if any(to.topic == topic for to in submission.messages)]
        elif not refused and isinstance(error, TooSlowError):
            suspects, why = list(inside), self._why_too_slow(inside)
        if len(suspects) > 1:
            self._split(inside)
        elif why is not None:
            refused |= dict.fromkeys(suspects, why)
        for submission, refusal in refused.items():
            submission.end(is_written=False, refusal=refusal)
        self._put_back([submission for submission in inside if submission not in refused], [])
        for topic in faults.silent:
            if topic not in self._silent:
                _log.warning("%s does not answer: what is for it waits, everything else goes on", topic)
            self._silent[topic] = self._clock.monotonic() + _SILENT_TOPIC_RETRY_S
        return bool(faults.silent)

    def _split(self, inside: Sequence[Submission]) -> None:
        """Have half of it in the next transaction, at once."""
        self._most, self._again_at = len(inside) // 2, 0.0
        self.expedite()

    def _why_too_slow(self, inside: Sequence[Submission]) -> tuple[str, KafkaError] | None:
        """Return why a large one is refused that was alone in two transactions which took too long; None for others."""
        # Once may be by chance.
        former, self._slow = self._slow, inside[0] if len(inside) == 1 else None
        if self._slow is None or self._slow is not former or former.size_bytes < _LARGE_BYTES:
            return None
        why = f"{former.size_bytes} bytes are not delivered in the time of one Kafka transaction"
        return former.messages[0].topic, KafkaError(KafkaError.MSG_SIZE_TOO_LARGE, why)
