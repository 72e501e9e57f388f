"""The transactional outbox: submissions and their offsets in one Kafka transaction, so that readers see each once.

It takes the submissions that came since the last transaction (`interval_s`) and writes them. It adds the group's
offsets of exactly the messages that are done with them, with the offset map, and commits. Handlers go on meanwhile.
Their results wait for the next transaction.

The submissions of an aborted transaction are written again before all others, and no handler is called again. A
transaction in doubt is settled first: a successor with the same id has ended it, so the group's committed offsets show
whether it was committed. The trackers mark the offsets done after the commit. The positions are computed as if they
were done already. A submission never goes without its offset: if the offset map has no room for the offset, the
submission waits, and so do all above it in its partition.

A transaction that fails for its content is *split*: the next one has half of it. So a submission that a broker refuses,
or that is too large to be delivered in time, is alone in the end. Then it is refused. A topic that does not answer is
*silent*: its submissions wait, with all behind them in their lanes. Now and then one of them is tried alone. The
submissions of other topics go on.

Fencing is by the group's generation: the broker refuses positions of a member that left the group, so results of a
zombie never become visible. The next owner of a partition asks for stable offsets, which waits for open transactions.

The poll thread composes transactions and acts on their ends. The calls of a transaction are made on a thread that can
be abandoned (`TransactionRunner`). So no rebalance can come between reading the group's generation and composing the
positions that are committed with it. `_main` reads as if it waited: it is a generator, which `serve` advances.
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

#: Failures of a transaction, besides errors of the client library.
_FAILURES = (TooSlowError, GivenUpError, NotAnsweredError, UnknownEndError, NotOpenedError, IdLostError)
#: Seconds until the next try after a failure that is no fault of a message.
_RETRY_DELAY_S = 0.2
#: Longest time of an answer, in seconds, that counts as proof that a transaction in doubt was not committed.
_DOUBT_ANSWER_S = 1.0
#: Seconds between two log lines about failures of one kind.
_LOG_AGAIN_S = 10.0
#: Seconds between two checks of a call under way.
_CALL_POLL_S = 0.005
#: Most submissions in one transaction, and most bytes.
_MOST = 20_000
_MOST_BYTES = 32 * 1024 * 1024
#: Queued submissions at which a transaction begins before its interval has passed.
_FULL = 5_000
#: A smaller submission, in bytes, is never blamed for a transaction that takes too long.
_LARGE_BYTES = 1024 * 1024
#: Seconds until a silent topic is tried again.
_SILENT_TOPIC_RETRY_S = 5.0


class TransactionalOutbox(Outbox):
    """Sends in Kafka transactions, exactly once.

    Args:
        interval_s: least seconds between the beginnings of two transactions.
        assignments: the partitions whose positions are committed.
        complete_finished: completes the messages that handlers have finished in runs under way.
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
        #: Returns the group's metadata for committing positions; None while this member has no id.
        self.generation: Callable[[], Any] = lambda: None
        #: Takes the error of a group that refuses positions because a permission is missing.
        self.note_refusal: Callable[[KafkaError], object] = lambda _: None
        self._began_at = 0.0
        # No transaction begins before this time, after a failure.
        self._retry_at = 0.0
        self._is_expedited = False
        # How many submissions the last transaction put back: they wait for a topic, or for room in the offset map.
        self._kept = 0
        # The transaction in doubt, and when the group's offsets denied its commit for the first time.
        self._doubt: Transaction | None = None
        self._denied_at: float | None = None
        # Most characters of an offset map.
        self._map_chars = MAX_METADATA_CHARS
        # Most submissions of the next transaction, and the submission that was alone in the last one and too slow.
        self._most = _MOST
        self._slow: Submission | None = None
        # Topics that did not answer, each with the time of its next try.
        self._silent: dict[str, float] = {}
        # Whether the transaction under way is the trial of such a topic, with one submission.
        self._is_trial = False
        #: Number of committed transactions.
        self.transactions = 0
        #: Whether it has failed for good. The consumer stops, and nothing is sent any more.
        self.has_failed = False
        self._steps = self._main()

    def connect(self, cluster: Cluster, config: Mapping[str, Any]) -> None:
        """As `Outbox` says; the first transaction connects."""
        self._runner = TransactionRunner(f"penstock-outbox-{self._group}", self._group, cluster, config)

    def serve(self) -> None:
        """Begin a due transaction, or act on the end of the one under way. An exception ends the consumer."""
        if self.has_failed:
            return
        try:
            next(self._steps)
        except:
            self.has_failed = True
            raise

    def submissions(self) -> list[Submission]:
        """As `Outbox` says; none after it has failed, so that no code waits for them."""
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
        """Return the commit points once these places are done, without commit points that the group has already."""
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
        return self._retry_at if self._is_expedited else max(self._retry_at, self._began_at + self._interval_s)

    def _main(self) -> Steps[None]:
        while True:
            if len(self._queue) - self._kept >= _FULL:
                self.expedite()
            # After a commit the next one begins at once if it is due.
            if self._clock.monotonic() < self._due_at or not (yield from self._transact()):
                yield

    def _transact(self) -> Steps[bool]:
        """Run one transaction with the queued submissions; return whether it was committed."""
        self._is_expedited, self._began_at = False, self._clock.monotonic()
        transaction: Transaction | None = None
        try:
            yield from self._runner.require_open()
            if not (yield from self._settle_doubt()):
                self._retry_at = self._clock.monotonic() + SURE_S
                return False
            metadata = self.generation()
            if metadata is None:
                self._retry_at = self._clock.monotonic() + _RETRY_DELAY_S
                return False
            transaction = self._next()
            if transaction.submissions or transaction.positions:
                yield from self._runner.run(transaction, metadata, is_trial=self._is_trial)
                self._note_committed(transaction)
                return True
        except (*_FAILURES, KafkaException, BufferError) as error:
            self._note_failed(transaction, error)
        return False

    def _next(self) -> Transaction:
        """Compose the next transaction: the first submissions that may go and whose offsets the positions cover."""
        aside: list[Submission] = []
        lanes: set[ConsumerLane] = set()
        full: Full = {}
        while True:
            taken, kept = self._take(aside, lanes, full)
            positions = self.changed(places := places_of(taken))
            while note_full(full, places, positions):
                # In front of the kept ones: of one key, the kept submission is the later one.
                kept = [*(submission for submission in taken if has_no_room(full, submission)), *kept]
                taken = [submission for submission in taken if not has_no_room(full, submission)]
                positions = self.changed(places := places_of(taken))
            aside += kept
            # Lower offsets make room for the kept ones, and may stand behind them in the queue.
            if taken or not kept:
                self._kept = len(aside)
                self._put_back(aside, taken)
                return Transaction(taken, places, positions)

    def _take(
        self, aside: Sequence[Submission], lanes: set[ConsumerLane], full: Full
    ) -> tuple[list[Submission], list[Submission]]:
        """Take submissions from the queue: those for one transaction, and those to keep for later.

        Kept are submissions for silent topics, all behind them in their `lanes`, and submissions that wait for room.
        Submissions in `aside` were kept before.
        """
        taken: list[Submission] = []
        gone: list[Submission] = []
        kept: list[Submission] = []
        keeps, now, size_bytes = bool(self._silent or full), self._clock.monotonic(), 0
        self._is_trial = False
        queue, most = self._queue, self._most
        while queue and len(taken) < most and not self._is_trial:
            submission = queue[0]
            # When its silent topics may be tried again; 0 if none of its topics is silent.
            until = max([0.0, *(self._silent.get(topic, 0.0) for topic in submission.topics)]) if keeps else 0.0
            is_silent = keeps and (until > now or submission.lane in lanes)
            is_kept = is_silent or (keeps and has_no_room(full, submission))
            # A trial of a silent topic is alone, because it could fail all others.
            if taken and not is_kept and (until or size_bytes + submission.size_bytes > _MOST_BYTES):
                break
            queue.popleft()
            if submission.assignment.is_gone:
                gone.append(submission)
            elif is_kept:
                kept.append(submission)
                if is_silent and submission.lane is not None:
                    lanes.add(submission.lane)
            else:
                taken.append(submission)
                size_bytes += submission.size_bytes
                self._is_trial = until > 0
        self._under_way = [*aside, *taken, *kept]
        for submission in gone:
            submission.end(is_written=False)
        return taken, kept

    def _put_back(self, submissions: Sequence[Submission], remaining: list[Submission]) -> None:
        """Put submissions back to the front of the queue; `remaining` stay in the transaction."""
        self._queue.extendleft(reversed(submissions))
        self._under_way = remaining

    def _settle_doubt(self) -> Steps[bool]:
        """Find out whether the transaction in doubt was committed. Its successor with the same id has ended it.

        A "no" counts only if it comes at once, and again some seconds later. A broker that was suspended reports old
        offsets until it learns that another broker coordinates the group now. Returns False if it must ask again.
        """
        if (doubt := self._doubt) is None:
            return True
        begun = self._clock.monotonic()
        # Offsets of a partition that is gone prove nothing: its next owner may have moved them.
        ours = {
            assignment: sent
            for assignment, sent in doubt.positions.items()
            if not assignment.is_gone and sent != assignment.committed
        }
        found = (yield from self._runner.committed(list(ours))) if ours else {}
        # A transaction is atomic, so one matching partition proves the commit.
        if any(found.get(assignment) == sent for assignment, sent in ours.items()):
            self._doubt = None
            self._note_committed(doubt)
            return True
        now = self._clock.monotonic()
        if ours and (self._denied_at is None or now - begun > _DOUBT_ANSWER_S or now < self._denied_at + SURE_S):
            self._denied_at = now if self._denied_at is None else self._denied_at
            return False
        self._doubt = None
        self._put_back(doubt.submissions, [])
        return True

    def _note_committed(self, transaction: Transaction) -> None:
        for assignment, blocks in transaction.places.items():
            for block, indexes in blocks.items():
                assignment.tracker.complete(block, indexes)
        for assignment, point in transaction.positions.items():
            assignment.committed, assignment.acknowledged = point, True
        self.transactions += 1
        self._most, self._slow = min(2 * self._most, _MOST), None
        for submission in transaction.submissions:
            for topic in submission.topics if self._silent else ():
                self._silent.pop(topic, None)
            submission.end(is_written=True)
        self._under_way = []

    def _note_failed(self, transaction: Transaction | None, error: BaseException) -> None:
        """Queue its submissions again, except for those that the broker refused."""
        self._retry_at = self._clock.monotonic() + _RETRY_DELAY_S
        is_lost = isinstance(error, IdLostError)
        # A commit that was abandoned may still take effect, until a successor has taken the id.
        if transaction is not None and isinstance(error, UnknownEndError | NotAnsweredError):
            self._doubt, self._denied_at = transaction, None
        elif transaction is not None:
            is_lost = self._judge(transaction.submissions, error)
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
            # Rationed, because it is tried again at once.
            extra=once_in(_LOG_AGAIN_S, (self._group, code_of(error) or type(error)), self._clock.monotonic()),
        )

    def _leave_maps_out(self) -> None:
        """Commit without offset maps from now on, and at once: the broker refuses them."""
        self._retry_at = 0.0
        self.expedite()
        if not self._map_chars:
            return
        self._map_chars = 0
        _log.warning(
            "the broker refuses commit metadata of less than 4,096 characters, which records the messages done above "
            "the committed offset; from now on group %s publishes the results of a partition in the order of its "
            "offsets, so a retried message holds back the messages behind it; set offset.metadata.max.bytes to 4096 on "
            "the brokers, and start again",
            self._group,
        )

    def _judge(self, submissions: Sequence[Submission], error: BaseException) -> bool:
        """Refuse submissions with a fault, split the transaction if the culprit is unknown, and queue the rest again.

        Returns whether topics are silent. Then a broker may be unable to end the transaction there.
        """
        faults = self._runner.faults()
        refused = {
            submission: (topic, faults.topics[topic])
            for submission in submissions
            for topic in submission.topics
            if topic in faults.topics
        }
        # One of the suspects is the culprit, but it is unknown which one.
        suspects, why = list[Submission](), faults.message
        if not refused and why is not None:
            topic = why[0]
            suspects = [submission for submission in submissions if topic in submission.topics]
        elif not refused and isinstance(error, TooSlowError):
            suspects, why = list(submissions), self._why_too_slow(submissions)
        if len(suspects) > 1:
            self._split(submissions)
        elif why is not None:
            refused |= dict.fromkeys(suspects, why)
        for submission, refusal in refused.items():
            submission.end(is_written=False, refusal=refusal)
        self._put_back([submission for submission in submissions if submission not in refused], [])
        for topic in faults.silent:
            if topic not in self._silent:
                _log.warning("%s does not answer: its messages wait, everything else goes on", topic)
            self._silent[topic] = self._clock.monotonic() + _SILENT_TOPIC_RETRY_S
        return bool(faults.silent)

    def _split(self, submissions: Sequence[Submission]) -> None:
        """Begin the next transaction at once, with half of the submissions."""
        self._most, self._retry_at = len(submissions) // 2, 0.0
        self.expedite()

    def _why_too_slow(self, submissions: Sequence[Submission]) -> tuple[str, KafkaError] | None:
        """Return the refusal of a large submission that was alone in two slow transactions; None for any other."""
        # Once may be chance.
        former, self._slow = self._slow, submissions[0] if len(submissions) == 1 else None
        if self._slow is None or self._slow is not former or former.size_bytes < _LARGE_BYTES:
            return None
        why = f"{former.size_bytes} bytes are not delivered in the time of one Kafka transaction"
        return former.messages[0].topic, KafkaError(KafkaError.MSG_SIZE_TOO_LARGE, why)
