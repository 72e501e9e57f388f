"""How far publication is, and callbacks of those who wait for it: the done log, read as every committed reader reads.

A note in `done` stands in the same Kafka transaction as the message it speaks of: once a committed reader sees the one,
it sees the other.
"""

from __future__ import annotations

import logging
import threading

from confluent_kafka import KafkaError, KafkaException, Message

from penstock.clients.bounded_calls import CLOSE_S
from penstock.clients.kafka_errors import ErrorKind, is_missing_right, reason
from penstock.clients.reading import PartitionReader, Place
from penstock.clients.requests.answers import asked_until_ready
from penstock.clients.rights import MissingRightError, Operation, principal_of, topic_right
from penstock.clients.transactional.missing_rights import MissingRights
from penstock.errors import BrokerConnectionError, MessageFormatError
from penstock.options import ClientConfig
from penstock.transactions.rationed_log import RationedLog
from penstock.transactions.store import SettledCallback
from penstock.transactions.stores.kafka.publication_pace import PublicationPace
from penstock.transactions.wire.done_records import decode_done, last_settled
from penstock.transactions.wire.ops import Verdict
from penstock.transactions.wire.topics import StoreTopics

_log = logging.getLogger("penstock.transactions")

_POLL_S = 0.1
_ANSWER_S = 10.0
#: Milliseconds between two fetches while much is published: each wakes brokers and this process.
_FETCH_MS = 5
_NEEDED = '{} cannot be read, which wait="published" needs'


class DoneWatch:
    """Follows the done log from its end, completes who waits, and tells the pace. `add` and `remove` are thread-safe.

    Raises `BrokerConnectionError` where that end could not be learnt, `MissingRightError` where it may not be read.
    """

    def __init__(
        self, bootstrap_servers: str, config: ClientConfig, topics: StoreTopics, name: str, pace: PublicationPace
    ) -> None:
        self._topics = topics
        self._pace = pace
        self._right = topic_right(Operation.READ, topics.done)
        self._rights = MissingRights(config)
        self._ration = RationedLog()
        # Added by any thread before the halves are stored, taken by the watching one: single steps on a dict.
        self._waiting: dict[str, SettledCallback] = {}
        #: What it may not do, so that it sees nothing; empty where it may. Written by the watching thread.
        self.lacking = ""
        self._stopping = threading.Event()
        paced = {"fetch.wait.max.ms": 100, "queued.min.messages": 1, "fetch.queue.backoff.ms": _FETCH_MS}
        self._reader = PartitionReader(
            bootstrap_servers,
            config,
            f"{topics.prefix}.watch",
            self._not_read,
            given={**paced, "enable.partition.eof": False},
        )
        try:
            # Where the log ends for a committed reader now: what is settled from here on comes behind.
            numbers = range(topics.partitions)
            bounds = asked_until_ready(lambda: self._reader.bounds(topics.done, numbers, _ANSWER_S), _ANSWER_S)
            self._reader.start({(topics.done, number): end for number, (_, end) in bounds.items()})
        except KafkaException as error:
            self._reader.close()
            if is_missing_right(error):
                raise MissingRightError(_NEEDED.format(topics.done), [self._right], principal_of(config)) from error
            raise BrokerConnectionError(
                f"the end of {topics.done} at {bootstrap_servers} is not known after {_ANSWER_S:g} s: {reason(error)};"
                ' see that the brokers run, or do without wait="published"'
            ) from error
        self._thread = threading.Thread(target=self._follow, name=f"penstock-published-{name}", daemon=True)
        self._thread.start()

    def add(self, transaction_id: str, callback: SettledCallback) -> None:
        """Call back once a transaction is settled."""
        self._waiting[transaction_id] = callback

    def remove(self, transaction_id: str) -> None:
        """Do not call back."""
        self._waiting.pop(transaction_id, None)

    def stop(self) -> None:
        """End. Callbacks that still wait are not called; the producer gives those transactions up."""
        self._stopping.set()
        self._thread.join(_POLL_S + CLOSE_S)
        if self._thread.is_alive():
            _log.warning("%s is left behind: a call of its Kafka client does not return", self._thread.name)

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
            _log.warning("%s[%s]@%s: %s", self._topics.done, message.partition(), message.offset(), bad)
            return
        for note in notes:
            if note.verdict is not Verdict.UNKNOWN:
                callback = self._waiting.pop(note.transaction_id, None)
                if callback is not None:
                    callback(note.verdict)
