"""How far publication is, and callbacks of those who wait for it: the done log, read as every committed reader reads.

A note in `done` stands in the same Kafka transaction as the message it speaks of: once a committed reader sees the one,
it sees the other.
"""

from __future__ import annotations

import logging
import threading
import time

from confluent_kafka import KafkaException, Message, TopicPartition

from penstock import clients
from penstock.clients.kafka_errors import concerns_a_group, is_missing_right, reason
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
_RECORDS = 1_000
#: Milliseconds between two fetches while much is published: each wakes brokers and this process.
_FETCH_MS = 5


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
        self._stopping = threading.Event()
        self._consumer = clients.consumer(
            bootstrap_servers,
            {
                **config,
                "group.id": f"{topics.prefix}.watch",
                "enable.auto.commit": False,
                "auto.offset.reset": "earliest",
                "isolation.level": "read_committed",
                "fetch.wait.max.ms": 100,
                "queued.min.messages": 1,
                "fetch.queue.backoff.ms": _FETCH_MS,
            },
        )
        try:
            # Where the log ends for a committed reader now: what is settled from here on comes behind.
            places = [TopicPartition(topics.done, number) for number in range(topics.partitions)]
            asked_until_ready(lambda: self._find_ends(places), _ANSWER_S)
            self._consumer.assign(places)
        except KafkaException as error:
            self._consumer.close()
            if is_missing_right(error):
                what = f'{topics.done} cannot be read, which wait="published" needs'
                raise MissingRightError(what, [self._right], principal_of(config)) from error
            raise BrokerConnectionError(
                f"the end of {topics.done} at {bootstrap_servers} was not told within {_ANSWER_S:g} s: {reason(error)};"
                ' see that the brokers run, or do without wait="published"'
            ) from error
        self._thread = threading.Thread(target=self._follow, name=f"penstock-published-{name}", daemon=True)
        self._thread.start()

    @property
    def lacking(self) -> str:
        """What it may not do, so that it sees nothing; empty where it may."""
        return next(iter(self._rights.missing().values()), "")

    def add(self, transaction_id: str, callback: SettledCallback) -> None:
        """Call back once a transaction is settled."""
        self._waiting[transaction_id] = callback

    def remove(self, transaction_id: str) -> None:
        """Do not call back."""
        self._waiting.pop(transaction_id, None)

    def stop(self) -> None:
        """End. Callbacks that still wait are not called; the producer gives those transactions up."""
        self._stopping.set()
        self._thread.join()

    def _find_ends(self, places: list[TopicPartition]) -> None:
        for place in places:
            place.offset = self._consumer.get_watermark_offsets(place, _ANSWER_S)[1]

    def _follow(self) -> None:
        try:
            while not self._stopping.is_set():
                first = self._consumer.poll(_POLL_S)
                if first is not None:
                    for message in (first, *self._consumer.consume(_RECORDS, 0)):
                        self._take(message)
        finally:
            self._consumer.close()

    def _take(self, message: Message) -> None:
        error = message.error()
        if error is not None:
            if concerns_a_group(error):
                # It is nobody's member, and needs none.
                return
            if is_missing_right(error):
                if self._waiting:
                    self._rights.refused(
                        f'{self._topics.done} cannot be read, which wait="published" needs', self._right
                    )
            else:
                text = "%s cannot be read: %s; it is tried again"
                self._ration.warn("done", text, self._topics.done, reason(error))
            # Errors come back at once: without a pause this would spin.
            time.sleep(_POLL_S)
            return
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
