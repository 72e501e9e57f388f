"""The store in Kafka topics as producers use it: it stores halves and decisions, and returns checks."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence
from queue import SimpleQueue
from typing import Any

from confluent_kafka import KafkaError, Message

from penstock import clients
from penstock.clients.bounded_calls import ask_again
from penstock.clients.kafka_errors import concerns_a_group, is_missing_right, reason
from penstock.clients.rights import Operation, group_right, topic_right
from penstock.clients.transactional.missing_rights import MissingRights
from penstock.errors import DecisionNotStoredError, MessageFormatError, TransactionError
from penstock.options import ClientConfig
from penstock.transactions.acked_producer import AckedProducer, wire_headers
from penstock.transactions.core.decisions import not_cancelled, not_pending
from penstock.transactions.rationed_log import RationedLog
from penstock.transactions.store import DecidedCallback, Prepared, PreparedCallback, SettledCallback
from penstock.transactions.stores.kafka.administration import KafkaAdministration
from penstock.transactions.stores.kafka.done_watch import DoneWatch
from penstock.transactions.stores.kafka.sends import RecordSends, StoredHalves
from penstock.transactions.stores.target_topics import TargetTopics
from penstock.transactions.wire.half import CheckRequest, Half, decode_check_request
from penstock.transactions.wire.ops import Author, Op, Verdict
from penstock.transactions.wire.topics import StoreTopics, open_topics, require_prefix

_log = logging.getLogger("penstock.transactions")

#: Check requests read at once.
_REQUESTS = 500
_STOP_POLL_S = 0.005

# Enum members are slow to look up, and this code runs for every message.
_PRODUCER = Author.PRODUCER

#: The permissions that every producer needs. Waiting for publication and answering checks need READ on one more topic;
#: if it is missing, they raise an error.
_NEEDS = {
    "half": (Operation.WRITE,),
    "op": (Operation.WRITE,),
    "done": (Operation.DESCRIBE,),
    "check": (Operation.DESCRIBE,),
    "discarded": (Operation.DESCRIBE,),
}


class KafkaCheckSource:
    """This producer's share of its group's checks. Used by one thread."""

    def __init__(self, bootstrap_servers: str, config: ClientConfig, topics: StoreTopics, group: str) -> None:
        self._group = group
        self._topics = topics
        self._rights = MissingRights(config)
        self._ration = RationedLog()
        settings: dict[str, Any] = {
            **config,
            "group.id": topics.checkers(group),
            # Requests from before the first start of the group are answered, too.
            "auto.offset.reset": "earliest",
            # Added partitions are noticed within seconds.
            "topic.metadata.refresh.interval.ms": 10_000,
            # A dead producer keeps its share for this long; until then its checks are sent in vain.
            "session.timeout.ms": 6000,
            "heartbeat.interval.ms": 1500,
        }
        self._consumer = clients.consumer(bootstrap_servers, settings)
        self._consumer.subscribe([topics.check])

    def take(self, timeout_s: float, running: Collection[str] = ()) -> Sequence[CheckRequest]:  # noqa: ARG002 - a check has one receiver
        """Return available checks; wait up to `timeout_s` seconds for the first. Unreadable records are logged."""
        first = self._consumer.poll(timeout_s)
        if first is None:
            return ()
        return [
            request
            for message in (first, *self._consumer.consume(_REQUESTS, 0))
            if (request := self._read(message)) is not None and request.half.group == self._group
        ]

    def _read(self, message: Message) -> CheckRequest | None:
        error = message.error()
        if error is not None:
            self._report_not_read(error)
            # Errors come again at once: without a pause this would spin.
            time.sleep(0.1)
            return None
        try:
            return decode_check_request(message.key(), message.value(), wire_headers(message))
        except MessageFormatError as bad:
            _log.warning("%s:%s@%s: %s", self._topics.check, message.partition(), message.offset(), bad)
            return None

    def _report_not_read(self, error: KafkaError) -> None:
        if is_missing_right(error):
            is_group = concerns_a_group(error)
            checkers = group_right(self._topics.checkers(self._group))
            right = checkers if is_group else topic_right(Operation.READ, self._topics.check)
            self._rights.refused(f"checks of group {self._group} cannot be answered", right)
        else:
            text = "%s cannot be read: %s; it is tried again"
            self._ration.warn("check", text, self._topics.check, reason(error))

    def close(self) -> None:
        """Leave the group: another producer gets its checks at once."""
        self._consumer.close()


class KafkaStore:
    """Halves in `<prefix>.half`, decisions in `<prefix>.op`. Thread-safe; `start` and `stop` are called once each.

    A half or decision that is not acknowledged within `send_timeout_s` counts as not stored. `in_flight` returns the
    number of transactions that the producer has in flight.
    """

    def __init__(
        self,
        bootstrap_servers: str,
        *,
        prefix: str,
        partitions: int,
        config: ClientConfig,
        send_timeout_s: float,
        name: str,
        in_flight: Callable[[], int],
    ) -> None:
        require_prefix(prefix)
        self._bootstrap_servers = bootstrap_servers
        self._config = config
        self._send_timeout_s = send_timeout_s
        self._admin = clients.admin(bootstrap_servers, config)
        self._name = name
        self._sends = AckedProducer(bootstrap_servers, config, send_timeout_s, name)
        # start() sets the topics again, with their real partitions, and makes the parts below before any other call.
        self._topics = StoreTopics(prefix, partitions)
        self._in_flight = in_flight
        self._watch: DoneWatch
        self._records: RecordSends
        self._targets = TargetTopics(self._admin, self._topics.may_publish_to, stores_in_kafka=True)

    def start(self) -> None:
        """Create missing topics of the store and start sending. Raises the errors of `open_topics`."""
        self._topics = open_topics(self._admin, self._topics.prefix, self._topics.partitions, needs=_NEEDS)
        self._watch = DoneWatch(self._bootstrap_servers, self._config, self._topics, self._name, self._in_flight)
        self._records = RecordSends(self._sends, self._topics, self._watch.pace)
        self._sends.after_reports = self._records.after_reports
        self._sends.start()

    def stop(self, timeout_s: float) -> None:
        """Wait up to `timeout_s` seconds for unacknowledged records, and end."""
        if self._sends.is_inherited:
            # In a forked process the open records belong to the parent.
            return
        self._watch.pace.end()
        deadline = time.monotonic() + timeout_s
        ask_again(lambda: not self._records.unanswered, timeout_s, _STOP_POLL_S)
        left = self._sends.stop(max(0.0, deadline - time.monotonic()))
        # Decisions that still wait are refused.
        self._records.after_reports()
        if left:
            _log.warning(
                "%d records of store %s were not acknowledged; checks will settle them", left, self._topics.prefix
            )
        self._watch.stop()

    def require_target(self, topic: str, partition: int | None) -> None:
        """Raise the errors of `TargetTopics.require`, or `StoppedError` in a forked process."""
        self._sends.require_own()
        if partition is not None or topic not in self._targets.counts:
            self._targets.require(topic, partition)

    def prepare(self, halves: Sequence[Half], callback: PreparedCallback, ordering_key: bytes | None = None) -> None:
        """Store halves in one half partition; call back once they are durable. See `RecordSends.prepare`."""
        self._records.prepare(halves, callback, ordering_key)

    def decide(self, prepared: Prepared, verdict: Verdict, callback: DecidedCallback) -> None:
        """Store the producer's decision; call back once it is durable, or with the error if that is not known."""
        assert isinstance(prepared, StoredHalves)  # noqa: S101 - the caller returns the object of `prepare`
        half = prepared.halves[0]
        place = (prepared.partition, prepared.offsets)
        # The same as `Op(...)` in half the time: it runs thousands of times a second.
        op = tuple.__new__(Op, (half.transaction_id, verdict, _PRODUCER, half.group, *place, 0, ""))
        self._records.decide(op, callback)

    def answer(self, request: CheckRequest, verdict: Verdict, author: Author) -> None:
        """Store the answer to a check and return once it is durable, or raise `DecisionNotStoredError`."""
        half, place = request.half, (request.half_partition, (request.half_offset,))
        op = Op(half.transaction_id, verdict, author, half.group, *place, request.check_number)
        answers: SimpleQueue[TransactionError | None] = SimpleQueue()
        self._records.decide(op, answers.put)
        error = answers.get()
        if error is not None:
            raise error

    def cancel(self, transaction_id: str, group: str, wait_s: float) -> None:
        """Take back a committed message that is not due yet, and return once it is rolled back; see `Store.cancel`.

        It reads all pending transactions, since there is no index of ids. Whether the message is due depends on the
        broker's clock when the decision is stored. The done log shows the result, once a coordinator has settled it.
        """
        with KafkaAdministration(self._bootstrap_servers, self._topics.prefix, self._config) as store:
            found = store.find(transaction_id)
            end = store.end_of(transaction_id) if found is None else found.pending.verdict
            is_known = end is not None if found is None else found.pending.group == group
            if not is_known:
                raise not_pending(transaction_id, group)
            if found is not None and end is Verdict.COMMIT and found.pending.half.deliver_at_ms is not None:
                end, waits = store.apply(found, Verdict.ROLLBACK, Author.PRODUCER, "", wait_s)
                if end is Verdict.ROLLBACK and waits:
                    raise DecisionNotStoredError(
                        f"transaction {transaction_id}: its cancellation is stored, but no coordinator has settled it "
                        f"in {wait_s:g} s; a running coordinator does so, if it was stored before the message was due: "
                        f"look with `penstock tx show {transaction_id}`"
                    )
        if end is not Verdict.ROLLBACK:
            raise not_cancelled(transaction_id, end)

    def watch(self, transaction_id: str, callback: SettledCallback) -> None:
        """Call back once a transaction is settled, as soon as a committed reader of the done log sees it."""
        self._watch.add(transaction_id, callback)

    def forget(self, transaction_id: str) -> None:
        """Give a watch up."""
        self._watch.remove(transaction_id)

    def checks(self, group: str) -> KafkaCheckSource:
        """Return the checks of a producer group, from `<prefix>.check`."""
        return KafkaCheckSource(self._bootstrap_servers, self._config, self._topics, group)
