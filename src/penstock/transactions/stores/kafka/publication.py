"""How far publication is, as a producer follows it in the done log: who waits for it, and the pace that it sets.

A note in `done` stands in the same Kafka transaction as the message it speaks of: once a committed reader sees the one,
it sees the other. While publication does not keep up, answers of stored decisions come when it has. Who sends faster
than coordinators publish fills the logs, and each message waits for all before it. So what is decided and not published
is bounded by what the producer has in flight: an answer beyond that waits until enough was published, and with it
whoever waits for it before sending more. No answer waits long, and none where publication is away: what it has not
reached within half a second counts no more.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from confluent_kafka import KafkaError, KafkaException, Message

from penstock import clients
from penstock.clients.answers import answered, asked_until_ready
from penstock.clients.bounded_calls import CLOSE_S, BriefQuestion
from penstock.clients.groups import describe_groups
from penstock.clients.kafka_errors import ErrorKind, code_of, is_missing_right, reason
from penstock.clients.reading import PartitionReader, Place
from penstock.clients.rights import MissingRightError, Operation, principal_of, topic_right
from penstock.clients.topics import partition_counts
from penstock.clients.transactional.missing_rights import MissingRights
from penstock.errors import BrokerConnectionError, MessageFormatError, PenstockError, StoppedError
from penstock.options import ClientConfig
from penstock.transactions.operator.inspection import Patience
from penstock.transactions.rationed_log import RationedLog
from penstock.transactions.store import SettledCallback
from penstock.transactions.stores.kafka.inspection import KafkaInspection
from penstock.transactions.stores.kafka.status import Status, target_text
from penstock.transactions.wire.done_records import decode_done, last_settled
from penstock.transactions.wire.ops import Verdict
from penstock.transactions.wire.topics import StoreTopics

#: Seconds that a look may take, that one request of it may, that it waits for brokers which do not answer at once, and
#: for which it is good.
_LOOKUP_BUDGET_S = 8.0
_LOOK_ANSWER_S = 3.0
_BROKER_WAIT_S = 2.0
_LOOKUP_VALID_S = 2.0


class Observation(NamedTuple):
    """What was found at one time."""

    #: Those that exist.
    topics: frozenset[str]
    statuses: Sequence[Status]
    #: How many run; None: nobody knows.
    coordinators: int | None


class PublicationDiagnosis:
    """Finds causes. Thread-safe. `observe` may take long, or for ever."""

    def __init__(self, observe: Callable[[], Observation], store: str) -> None:
        self._observe = observe
        self._store = store
        self._question = BriefQuestion(f"look into {store}")
        # What was found last, or what that failed for, in words; and when. One thread at a time has the question.
        self._found: Observation | str = ""
        self._found_at = float("-inf")

    def cause(self, topics: Sequence[str]) -> str:
        """Return what a committed transaction to these topics waits for, in words; empty where that is not known."""
        found = self._question.ask(self._look, _LOOKUP_BUDGET_S)
        return why(found, topics, self._store) if isinstance(found, Observation) else found or ""

    def _look(self) -> Observation | str:
        if time.monotonic() - self._found_at > _LOOKUP_VALID_S:
            try:
                self._found = self._observe()
            except BrokerConnectionError:
                self._found = "Kafka, of which no broker answers"
            except (PenstockError, KafkaException):
                self._found = ""
            self._found_at = time.monotonic()
        return self._found


def why(found: Observation, topics: Sequence[str], store: str) -> str:
    """Return what a committed transaction waits for, by what was found; empty where that tells nothing. Pure."""
    missing = sorted(set(topics) - found.topics)
    if missing:
        return f"topic {', '.join(missing)}, which does not exist"
    halted = next((halt for status in found.statuses for halt in status.halts), "")
    stopped = f"a coordinator of {store}: none runs, so start one" if found.coordinators == 0 else ""
    return target_text(topics, found.statuses) or stopped or halted


def observed(servers: str, config: ClientConfig, topics: StoreTopics) -> Observation:
    """Observe a store in Kafka, by clients that end with the observation: see `clients.groups`."""
    admin = clients.admin(servers, config)
    counts = partition_counts(admin, servers, _LOOK_ANSWER_S)
    inspection = KafkaInspection(servers, config, topics, Patience(_BROKER_WAIT_S))
    asked = describe_groups(admin, [topics.coordinators])
    coordinators: int | None
    try:
        coordinators = len(answered(asked[topics.coordinators], _LOOK_ANSWER_S).members)
    except KafkaException as error:
        # None has ever been there; or a producer has not the right to ask.
        coordinators = 0 if code_of(error) == KafkaError.GROUP_ID_NOT_FOUND else None
    return Observation(frozenset(counts), inspection.seen_statuses(), coordinators)


#: How many may be decided and not published: at least and at most, and for each transaction in flight beyond a few.
#: With few in flight the time to visible counts, with hundreds the rate, and more than the most made it no higher.
_LEAST, _MOST = 128, 4_000
_EACH, _FEW = 6, 42
#: Seconds that an answer is held at most, about. Who catches up after an outage is behind for much longer.
_MAX_PACING_S = 0.1
#: Seconds after which a decision that is not published yet counts no more.
_LAG_VALID_S = 0.5
#: Seconds in which as many decisions as may be unpublished make a producer busy enough to follow the publication.
_BUSY_WINDOW_S = 0.1

#: OpPlace of a decision: offset of its op record, and index there.
OpPlace = tuple[int, int]
_NOWHERE: OpPlace = (-1, -1)
Complete = Callable[[], object]


class _Answered(NamedTuple):
    """An op record whose decisions are answered and not published: the place of the last one, how many, since when."""

    place: OpPlace
    decisions: int
    at: float


class _Held(NamedTuple):
    """An op record whose decisions are stored and not answered."""

    partition: int
    record: _Answered
    complete: Complete


class PublicationPace:
    """Holds answers back while publication lags. Thread-safe; answers are given in the thread that lets them go.

    Args:
        in_flight: tells how many transactions the producer has in flight.
        follow: has `published` called from now on, by a thread that follows the publication; called once, when the
            producer becomes busy. Until the first such call nothing is held.
        now: the time in seconds that only rise.
    """

    def __init__(
        self, in_flight: Callable[[], int], follow: Callable[[], object], now: Callable[[], float] = time.monotonic
    ) -> None:
        self._in_flight = in_flight
        self._follow = follow
        self._now = now
        # Guards all below.
        self._lock = threading.Lock()
        # By half partition, in the order of the op log; and how many decisions they are in all.
        self._answered: defaultdict[int, deque[_Answered]] = defaultdict(deque)
        self._ahead = 0
        # In the order in which they were stored.
        self._held: deque[_Held] = deque()
        # To which place each half partition is published, and when the last of them moved.
        self._published: dict[int, OpPlace] = {}
        self._moved_at = float("-inf")
        self._is_followed = self._is_ended = False
        # Decisions stored since a monotonic second, for telling who is busy.
        self._count, self._since = 0, now()

    def stored(self, partition: int, offset: int, count: int, complete: Complete) -> None:
        """Take in that an op record with so many decisions is stored; `complete` gives their answers, now or later."""
        follows = False
        with self._lock:
            now = self._now()
            if not self._is_followed:
                follows = self._is_followed = self._is_busy(count, now)
            self._held.append(_Held(partition, _Answered((offset, count - 1), count, now), complete))
            due = self._due(now)
        if follows:
            self._follow()
        _complete(due)

    def _is_busy(self, count: int, now: float) -> bool:
        if now - self._since > _BUSY_WINDOW_S:
            self._count, self._since = 0, now
        self._count += count
        return self._count > _LEAST

    def published(self, partition: int, place: OpPlace) -> None:
        """Take in that all decisions of a half partition up to a place are published, save what is put off."""
        with self._lock:
            self._moved_at, self._published[partition] = self._now(), place
            due = self._due(self._moved_at)
        _complete(due)

    def look(self) -> None:
        """Let those go that were held for long. Called now and then."""
        if self._held:
            with self._lock:
                due = self._due(self._now())
            _complete(due)

    def end(self) -> None:
        """Let all go, and hold nothing any more."""
        with self._lock:
            self._is_ended = True
            due = self._due(self._now())
        _complete(due)

    def _due(self, now: float) -> list[Complete]:
        """Return the answers that are due."""
        is_away = self._is_ended or now - self._moved_at > _LAG_VALID_S
        for partition, records in self._answered.items():
            while records and (now - records[0].at > _LAG_VALID_S or self._is_published(partition, records[0])):
                self._ahead -= records.popleft().decisions
        due: list[Complete] = []
        limit = max(_LEAST, min(_MOST, _EACH * (self._in_flight() - _FEW)))
        while self._held:
            partition, record, complete = self._held[0]
            is_over = is_away or self._is_published(partition, record)
            if not is_over and self._ahead + record.decisions > limit and now - record.at < _MAX_PACING_S:
                break
            self._held.popleft()
            due.append(complete)
            if not is_over:
                self._answered[partition].append(record)
                self._ahead += record.decisions
        return due

    def _is_published(self, partition: int, record: _Answered) -> bool:
        return record.place <= self._published.get(partition, _NOWHERE)


def _complete(due: list[Complete]) -> None:
    for complete in due:
        complete()


_log = logging.getLogger("penstock.transactions")

_POLL_S = 0.1
_ANSWER_S = 10.0
#: Milliseconds between two fetches while much is published: each wakes brokers and this process.
_FETCH_MS = 5
_NEEDED = '{} cannot be read, which wait="published" needs'


class DoneWatch:
    """Follows the done log, once somebody wants that; completes who waits, and tells the pace. Thread-safe."""

    def __init__(
        self, bootstrap_servers: str, config: ClientConfig, topics: StoreTopics, name: str, pace: PublicationPace
    ) -> None:
        self._bootstrap_servers, self._config, self._topics = bootstrap_servers, config, topics
        self._name = name
        self._pace = pace
        self._right = topic_right(Operation.READ, topics.done)
        self._rights = MissingRights(config)
        self._ration = RationedLog()
        # Added by any thread before the halves are stored, taken by the watching one: single steps on a dict.
        self._waiting: dict[str, SettledCallback] = {}
        #: What it may not do, so that it sees nothing; empty where it may. Written by the watching thread.
        self.lacking = ""
        # Guards the beginning: the two below are made under it.
        self._lock = threading.Lock()
        self._reader: PartitionReader
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()

    def add(self, transaction_id: str, callback: SettledCallback) -> None:
        """Call back once a transaction is settled. Raises as `follow`."""
        self.follow()
        self._waiting[transaction_id] = callback

    def remove(self, transaction_id: str) -> None:
        """Do not call back."""
        self._waiting.pop(transaction_id, None)

    def follow(self) -> None:
        """Follow the log from the end that it has now, if it is not followed yet.

        Raises `BrokerConnectionError` where that end could not be learnt, `MissingRightError` where it may not be read,
        and `StoppedError` where it is followed no more.
        """
        if self._thread is not None and not self._stopping.is_set():
            return
        with self._lock:
            if self._stopping.is_set():
                raise StoppedError(f"{self._topics.done} is not followed any more: {self._name} was stopped")
            if self._thread is None:
                self._begin()

    def _begin(self) -> None:
        topic, config = self._topics.done, self._config
        paced = {"fetch.wait.max.ms": 100, "queued.min.messages": 1, "fetch.queue.backoff.ms": _FETCH_MS}
        self._reader = PartitionReader(
            self._bootstrap_servers,
            config,
            f"{self._topics.prefix}.watch",
            self._not_read,
            given={**paced, "enable.partition.eof": False},
        )
        try:
            # Where the log ends for a committed reader now: what is settled from here on comes behind.
            numbers = range(self._topics.partitions)
            bounds = asked_until_ready(lambda: self._reader.bounds(topic, numbers, _ANSWER_S), _ANSWER_S)
            self._reader.start({(topic, number): end for number, (_, end) in bounds.items()})
        except KafkaException as error:
            self._reader.close()
            if is_missing_right(error):
                raise MissingRightError(_NEEDED.format(topic), [self._right], principal_of(config)) from error
            raise BrokerConnectionError(
                f"the end of {topic} at {self._bootstrap_servers} is not known after {_ANSWER_S:g} s: {reason(error)};"
                ' see that the brokers run, or do without wait="published"'
            ) from error
        self._thread = threading.Thread(target=self._follow, name=f"penstock-published-{self._name}", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End. Callbacks that still wait are not called; the producer gives those transactions up."""
        self._stopping.set()
        # Who is just beginning asks the brokers first; its thread ends at once then.
        if self._lock.acquire(timeout=CLOSE_S):
            self._lock.release()
        if self._thread is None:
            return
        self._thread.join(_POLL_S + CLOSE_S)
        if self._thread.is_alive():
            _log.warning("%s is abandoned: a call of its Kafka client does not return", self._thread.name)

    def _follow(self) -> None:
        try:
            while not self._stopping.is_set():
                for message in self._reader.poll(_POLL_S):
                    self._take(message)
        finally:
            self._reader.close()

    def _not_read(self, kind: ErrorKind, error: KafkaError, _place: Place) -> None:
        if kind is ErrorKind.MISSING_RIGHT:
            self.lacking = self._rights.refused(_NEEDED.format(self._topics.done), self._right)
        elif kind is not ErrorKind.GROUP:
            text = "%s cannot be read: %s; it is tried again"
            self._ration.warn("done", text, self._topics.done, reason(error))

    def _take(self, message: Message) -> None:
        if self.lacking:
            self.lacking = ""
            self._rights.granted(self._right)
        if self._waiting:
            self._call_back(message)
        settled = last_settled(message.value())
        if settled is not None:
            self._pace.published(message.partition() or 0, settled)

    def _call_back(self, message: Message) -> None:
        """Complete those who wait for what a record settles."""
        try:
            notes = decode_done(message.value()).notes
        except MessageFormatError as bad:
            _log.warning("%s:%s@%s: %s", self._topics.done, message.partition(), message.offset(), bad)
            return
        for note in notes:
            if note.verdict is not Verdict.UNKNOWN:
                callback = self._waiting.pop(note.transaction_id, None)
                if callback is not None:
                    callback(note.verdict)
