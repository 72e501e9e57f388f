"""Back-pressure from publication: a producer follows the done log, and answers decisions at the pace of publication.

A note in `done` is in the same Kafka transaction as its message: a committed reader sees both or neither. A producer
that sends faster than coordinators publish fills the logs, and each message waits for all before it. So the number of
decided and unpublished transactions is bounded by a limit that follows from the transactions in flight: an answer above
the limit waits until enough is published, and the sender waits with it. No answer waits long. If publication stands
still, none waits: a decision that is unpublished after half a second no longer counts.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import NamedTuple

from confluent_kafka import KafkaError, KafkaException, Message

from penstock.clients.answers import asked_until_ready
from penstock.clients.bounded_calls import CLOSE_S
from penstock.clients.kafka_errors import ErrorKind, is_missing_right, reason
from penstock.clients.reading import PartitionReader, Place
from penstock.clients.rights import MissingRightError, Operation, principal_of, topic_right
from penstock.clients.transactional.missing_rights import MissingRights
from penstock.errors import BrokerConnectionError, MessageFormatError, StoppedError
from penstock.options import ClientConfig
from penstock.transactions.rationed_log import RationedLog
from penstock.transactions.store import SettledCallback
from penstock.transactions.wire.done_records import decode_done, last_settled
from penstock.transactions.wire.ops import Verdict
from penstock.transactions.wire.topics import StoreTopics

_log = logging.getLogger("penstock.transactions")

#: The limit of decided and unpublished transactions: its bounds, and its growth for each transaction in flight above a
#: few. With few in flight, the time to visibility matters; with hundreds, the rate, which a higher limit did not raise.
_LEAST, _MOST = 128, 4_000
_EACH, _FEW = 6, 42
#: Approximate seconds that an answer waits at most. Coordinators that catch up after an outage lag for much longer.
_MAX_PACING_S = 0.1
#: Seconds after which an unpublished decision no longer counts.
_LAG_VALID_S = 0.5
#: A producer with more than `_LEAST` decisions in these seconds is busy: it follows the publication.
_BUSY_WINDOW_S = 0.1
_POLL_S = 0.1
#: Seconds for the brokers to return the end of the log; and seconds that a caller waits for it, including the last try.
_ANSWER_S = 10.0
_BEGIN_S = 2 * _ANSWER_S + CLOSE_S
#: Milliseconds between two fetches while much is published: each wakes brokers and this process.
_FETCH_MS = 5
_NEEDED = '{} cannot be read, which wait="published" needs'

#: The place of a decision: the offset of its op record, and its index there.
OpPlace = tuple[int, int]
_NOWHERE: OpPlace = (-1, -1)
Complete = Callable[[], object]


class _Answered(NamedTuple):
    """An op record: the place of its last decision, the number of decisions, and the time when it was stored."""

    place: OpPlace
    decisions: int
    at: float


class _Held(NamedTuple):
    """A stored op record whose decisions are not answered yet."""

    partition: int
    record: _Answered
    complete: Complete


class PublicationPace:
    """Delays answers while publication lags. Thread-safe; the thread whose call releases answers gives them.

    Args:
        in_flight: returns the number of transactions that the producer has in flight.
        follow: starts a thread that follows the publication and calls `published`. Called once, when the producer
            becomes busy. No answer is delayed before the first `published`.
    """

    def __init__(self, in_flight: Callable[[], int], follow: Callable[[], object]) -> None:
        self._in_flight = in_flight
        self._follow = follow
        # Guards all below.
        self._lock = threading.Lock()
        # Answered and unpublished op records by half partition, in log order; and their number of decisions.
        self._answered: defaultdict[int, deque[_Answered]] = defaultdict(deque)
        self._ahead = 0
        # In the order of storing.
        self._held: deque[_Held] = deque()
        # The last published place of each half partition, and the time of the last progress.
        self._published: dict[int, OpPlace] = {}
        self._moved_at = float("-inf")
        self._is_followed = self._is_ended = False
        # The decisions stored in the present busy window, and its begin.
        self._count, self._since = 0, time.monotonic()

    def stored(self, partition: int, offset: int, count: int, complete: Complete) -> None:
        """Note a stored op record with `count` decisions; `complete` answers them, now or later."""
        follows = False
        with self._lock:
            now = time.monotonic()
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
        """Note that all decisions of a half partition up to a place are published, except delayed messages."""
        with self._lock:
            self._moved_at, self._published[partition] = time.monotonic(), place
        self.release()

    def end(self) -> None:
        """Release all answers, and hold none from now on."""
        with self._lock:
            self._is_ended = True
        self.release()

    def release(self) -> None:
        """Give the held answers that are due. Called regularly."""
        if self._held:
            with self._lock:
                due = self._due(time.monotonic())
            _complete(due)

    def _due(self, now: float) -> list[Complete]:
        """Take and return the answers that are due."""
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


class DoneWatch:
    """Follows the done log once it is needed: calls waiting callbacks, and updates the pace. Thread-safe.

    `in_flight` returns the number of transactions that the producer has in flight.
    """

    def __init__(
        self, bootstrap_servers: str, config: ClientConfig, topics: StoreTopics, name: str, in_flight: Callable[[], int]
    ) -> None:
        self._bootstrap_servers, self._config, self._topics = bootstrap_servers, config, topics
        self._name = name
        #: Delays answers to decisions.
        self.pace = PublicationPace(in_flight, self.follow)
        self._right = topic_right(Operation.READ, topics.done)
        self._rights = MissingRights(config)
        self._ration = RationedLog()
        # Callbacks by transaction id. Any thread adds before the halves are stored, the watching thread removes: atomic
        # steps on a dict.
        self._waiting: dict[str, SettledCallback] = {}
        # Guards the two fields below.
        self._lock = threading.Lock()
        self._begun: Future[None] | None = None
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()

    def add(self, transaction_id: str, callback: SettledCallback) -> None:
        """Call back once a transaction is settled. Raises the error of `follow`."""
        if self._stopping.is_set():
            raise StoppedError(f"{self._topics.done} is no longer followed: {self._name} was stopped")
        try:
            self.follow().result(_BEGIN_S)
        except TimeoutError:
            raise self._end_unknown(f"after {_BEGIN_S:g} s") from None
        self._waiting[transaction_id] = callback

    def _end_unknown(self, why: str) -> BrokerConnectionError:
        return BrokerConnectionError(
            f"the end of {self._topics.done} at {self._bootstrap_servers} is not known {why}; see that the brokers "
            'run, or do without wait="published"'
        )

    def remove(self, transaction_id: str) -> None:
        """Do not call back."""
        self._waiting.pop(transaction_id, None)

    def follow(self) -> Future[None]:
        """Follow the log from its present end, unless it is followed already; the future is done once it is.

        The future fails with `BrokerConnectionError` if that end could not be read, and with `MissingRightError` if the
        client may not read the log.
        """
        with self._lock:
            if self._begun is None or (self._begun.done() and self._begun.exception() is not None):
                self._begun = Future()
                name = f"penstock-published-{self._name}"
                self._thread = threading.Thread(target=self._follow, args=(self._begun,), name=name, daemon=True)
                self._thread.start()
            return self._begun

    def stop(self) -> None:
        """End. Waiting callbacks are not called; the producer gives these transactions up."""
        self._stopping.set()
        with self._lock:
            thread = self._thread
        if thread is None:
            return
        thread.join(_POLL_S + CLOSE_S)
        if thread.is_alive():
            _log.warning("%s is abandoned: a call of its Kafka client does not return", thread.name)

    def _follow(self, begun: Future[None]) -> None:
        servers, config, group = self._bootstrap_servers, self._config, f"{self._topics.prefix}.watch"
        given = {
            "fetch.wait.max.ms": 100,
            "queued.min.messages": 1,
            "fetch.queue.backoff.ms": _FETCH_MS,
            "enable.partition.eof": False,
        }
        try:
            with PartitionReader(servers, config, group, self._not_read, given=given) as reader:
                self._begin(reader)
                begun.set_result(None)
                while not self._stopping.is_set():
                    for message in reader.poll(_POLL_S):
                        self._take(message)
        except Exception as error:
            if begun.done():
                raise
            # A waiting caller raises it, and the next follow() tries again. Until then the producer is not paced.
            _log.info("the producer of %s sends at its own pace: %s", self._name, error)
            begun.set_exception(error)

    def _begin(self, reader: PartitionReader) -> None:
        """Read from the present end for committed readers: transactions that are settled later come after it."""
        topic, numbers = self._topics.done, range(self._topics.partitions)
        try:
            bounds = asked_until_ready(lambda: reader.bounds(topic, numbers, _ANSWER_S), _ANSWER_S)
            reader.start({(topic, number): end for number, (_, end) in bounds.items()})
        except KafkaException as error:
            if is_missing_right(error):
                needed = _NEEDED.format(topic)
                raise MissingRightError(needed, [self._right], principal_of(self._config)) from error
            raise self._end_unknown(f"after {_ANSWER_S:g} s: {reason(error)}") from error

    def _not_read(self, kind: ErrorKind, error: KafkaError, _place: Place) -> None:
        if kind is ErrorKind.MISSING_RIGHT:
            self._rights.refused(_NEEDED.format(self._topics.done), self._right)
        elif kind is not ErrorKind.GROUP:
            text = "%s cannot be read: %s; it is tried again"
            self._ration.warn("done", text, self._topics.done, reason(error))

    def _take(self, message: Message) -> None:
        self._rights.granted(self._right)
        if self._waiting:
            self._call_back(message)
        settled = last_settled(message.value())
        if settled is not None:
            self.pace.published(message.partition() or 0, settled)

    def _call_back(self, message: Message) -> None:
        """Call the callbacks of the transactions that a record settles."""
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
