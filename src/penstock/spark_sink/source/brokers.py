"""The driver's questions to Kafka: the partitions of a query, begin and end of their logs, and deleted topics.

Under read_committed a log ends at its last stable offset, where an open transaction holds it. Such a query looks idle
while messages pile up, so the driver logs it. The client library cannot tell whose transaction it is; Kafka's own tool
can. An admin client asks for offsets: of all partitions together, with either isolation level.

The query's position in a deleted topic is kept. Otherwise the query would begin at 0 when the topic is back. The
topic's id shows whether it is the same topic then.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import tenacity
from confluent_kafka import IsolationLevel, KafkaError, KafkaException
from confluent_kafka.admin import OffsetSpec  # type: ignore[attr-defined] # not in its __all__

from penstock import clients
from penstock.clients.answers import CONNECT_TIMEOUT_S, first_answer
from penstock.clients.kafka_errors import is_missing_right, is_transient, reason
from penstock.clients.ration import once_in, rationed
from penstock.clients.rights import MissingRightError, Operation, principal_of, topic_right
from penstock.clients.topics import FIRST, LAST, ask_offsets, described, id_of, may_only_be_seen, require_seen
from penstock.errors import BrokerConnectionError, ConfigurationError, SourceError, TopicNotFoundError
from penstock.spark_sink.source.options import SourceOptions
from penstock.spark_sink.source.plan import EARLIEST, Log, Offsets, TopicPartition, place

_log = rationed("penstock.spark_sink")

#: Seconds for one question of a running query. If a broker is gone, the next question goes to another one.
_QUESTION_TIMEOUT_S = 3.0

_UNCOMMITTED = IsolationLevel.READ_UNCOMMITTED

#: Seconds for which a log's end must stand still before it is logged, and between two equal lines.
STALLED_S = 10.0
REPEAT_S = 60.0


@dataclass(frozen=True, slots=True)
class View:
    """The brokers' answer about all that a query reads, at one moment.

    Attributes:
        logs: begin and end of each partition's log.
        ids: the ids of topics; a topic that is created again has a new id. Empty if the brokers have no ids.
        refused: the errors of topics that cannot be seen or read.
    """

    logs: Mapping[TopicPartition, Log]
    ids: Mapping[str, str]
    refused: Mapping[str, KafkaException]

    def is_unknown(self, topic: str) -> bool:
        """Tell whether the brokers say that the topic does not exist, and is not merely hidden or unreachable."""
        error = self.refused.get(topic)
        return error is not None and error.args[0].code() == KafkaError.UNKNOWN_TOPIC_OR_PART


class OffsetReader:
    """Answers the driver's questions about one query's topics and offsets. One thread uses it.

    A `kafka.` option that the client library refuses raises `ConfigurationError`. Each question may raise
    `BrokerConnectionError` if no broker answers, `SourceError` if a leader does not answer, and `MissingRightError`.
    """

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._isolation = IsolationLevel.READ_COMMITTED if options.read_committed else _UNCOMMITTED
        self._make_admin = partial(clients.admin, options.bootstrap_servers, options.client)
        try:
            # The library checks the settings of tasks here, before any task starts with wrong ones.
            clients.consumer(options.bootstrap_servers, options.consumer_config).close()
            self._admin = self._make_admin()
        except clients.ClientRefusedError as refused:
            raise ConfigurationError(
                f"an option kafka.* is wrong: {refused} (names are librdkafka's. Instead of the Java client's "
                "sasl.jaas.config set sasl.username and sasl.password, or what sasl.oauthbearer.* and sasl.kerberos.* "
                "need; instead of a trust store ssl.ca.location or ssl.ca.pem, in PEM; a key store must be PKCS#12)"
            ) from None

    def first_view(self) -> View:
        """Return the view at a query's begin: all topics must exist and be visible; raises as `require_seen`."""
        view = self._view(CONNECT_TIMEOUT_S)
        try:
            require_seen(self._admin, view.refused)
        except TopicNotFoundError as error:
            raise TopicNotFoundError(f"the option subscribe names what is not there: {error}") from None
        return view

    def view(self, expected: Collection[str] = ()) -> View:
        """Return the visible part of all that the query reads, and the errors of the rest.

        Questions about `expected` topics are repeated as often as the options say: for a moment, a broker may not know
        them or not answer.
        """
        if not expected:
            return self._view(CONNECT_TIMEOUT_S)
        retry = tenacity.retry_if_exception_type(BrokerConnectionError) | tenacity.retry_if_result(
            lambda found: any(is_transient(found.refused[name]) for name in found.refused.keys() & set(expected))
        )
        return self._options.retrying(retry)(self._view, _QUESTION_TIMEOUT_S)

    def _view(self, timeout_s: float) -> View:
        topics = self._options.topics

        def ask() -> tuple[dict[str, Any], dict[str, KafkaException]]:
            found, refused = described(self._admin, topics, timeout_s)
            # Negative codes are the client's own errors: no broker has answered.
            if refused and not found and all(error.args[0].code() < 0 for error in refused.values()):
                raise next(iter(refused.values()))
            return found, refused

        try:
            found, refused = first_answer(self._admin, timeout_s, ask)
        except BrokerConnectionError:
            # The library keeps asking the former controller although it is away (2.16, seen for 87 s). A new client
            # asks for the present one.
            self._admin = self._make_admin()
            raise
        for name in [name for name, topic in found.items() if may_only_be_seen(topic)]:
            # If it were planned, its tasks would fail one after the other.
            del found[name]
            refused[name] = KafkaException(KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED, "Read is not allowed"))
        return View(
            logs=self._logs([(name, number) for name in found for number in range(len(found[name].partitions))]),
            ids={name: topic_id for name, topic in found.items() if (topic_id := id_of(topic)) is not None},
            refused=refused,
        )

    def _logs(self, parts: list[TopicPartition]) -> dict[TopicPartition, Log]:
        begin, end = self._offsets(parts, FIRST), self._offsets(parts, LAST)
        written = self._offsets(parts, LAST, _UNCOMMITTED)
        # The answers are from different moments.
        return {part: Log(begin[part], end[part], max(end[part], written[part])) for part in parts}

    def at_time(self, time_ms: int, parts: Iterable[TopicPartition]) -> Offsets:
        """Return for each partition the first offset at or after a time; -1: no message is that late."""
        time: OffsetSpec = OffsetSpec.for_timestamp(time_ms)
        return self._offsets(parts, time)

    def _offsets(
        self, parts: Iterable[TopicPartition], spec: OffsetSpec, isolation: IsolationLevel | None = None
    ) -> Offsets:
        """Ask for offsets; if a broker does not answer, repeat the question as often as the options say."""
        specs = dict.fromkeys(parts, spec)

        def ask() -> Offsets:
            found, failed = ask_offsets(self._admin, specs, _QUESTION_TIMEOUT_S, isolation or self._isolation)
            for part, error in failed.items():
                if is_missing_right(error):
                    raise self._not_allowed(f"the offsets of {place(part)} cannot be read", [part[0]]) from error
                raise SourceError(
                    f"the offsets of {place(part)} could not be read at {self._options.bootstrap_servers}: "
                    f"{reason(error)}; check that its leader is up"
                ) from error
            return found

        if not specs:
            return {}
        found: Offsets = self._options.retrying(tenacity.retry_if_exception(_may_pass))(ask)
        return found

    def _not_allowed(self, what: str, topics: Iterable[str]) -> MissingRightError:
        # Looking needs DESCRIBE alone; a reader needs READ, which includes it.
        rights = [topic_right(Operation.READ, topic) for topic in topics]
        return MissingRightError(what, rights, principal_of(self._options.client))


def _may_pass(error: BaseException) -> bool:
    cause = error.__cause__
    return isinstance(error, SourceError) and isinstance(cause, KafkaException) and is_transient(cause)


class GoneTopics:
    """The topics of one query in one run, and which of them are gone. Used by one thread."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        #: The ids of topics as they were last seen in this run.
        self._ids: dict[str, str] = {}
        #: Topics that were reported as gone, in part or whole, and are not back.
        self.reported: set[str] = set()

    def fixed(self, begun: Offsets, view: View) -> Offsets:
        """Return the query's fixed positions: its last one in partitions without a log, EARLIEST in recreated topics.

        A topic that has another id under the same name is read from its beginning. Each loss is reported once, and
        raises as `report_gone` if it ends the query.
        """
        fixed: Offsets = {}
        gone: set[str] = set()
        for part, offset in sorted(begun.items()):
            topic, read = part[0], f"{place(part)} was read up to offset {offset}"
            now = view.ids.get(topic)
            is_another = now is not None and self._ids.get(topic, now) != now
            if is_another:
                self._options.report_loss(f"{read}, but the topic was deleted and created again since")
            if part not in view.logs:
                gone.add(topic)
                if topic not in self.reported:
                    report_gone(self._options, part, read, view)
            if is_another or (part not in view.logs and topic in self._options.topics):
                fixed[part] = EARLIEST if is_another else offset
        self._ids |= view.ids
        self.reported = gone
        return fixed


def report_gone(options: SourceOptions, part: TopicPartition, read: str, view: View) -> None:
    """Report a partition that cannot be seen; `read` begins the sentence.

    Raises `MissingRightError` or `SourceError` if it is only hidden, and `DataLossError` if it is gone, unless
    `failOnDataLoss` is false.
    """
    error = view.refused.get(part[0])
    if part[0] not in options.topics:
        what = f"{read} and is read no more, as this query has subscribe={','.join(options.topics)}"
        options.report_loss(what, "give the query a checkpointLocation of its own")
    elif error is None or view.is_unknown(part[0]):
        options.report_loss(f"{read} and exists no more")
    elif is_missing_right(error):
        rights = [topic_right(Operation.READ, part[0])]
        raise MissingRightError(f"{read} and cannot be read now", rights, principal_of(options.client))
    else:
        raise SourceError(
            f"{read} and cannot be seen now: {reason(error)}; check its brokers, then start the query again: it goes "
            "on there"
        )


class StalledLogs:
    """Watches the readable ends of logs. Used by one thread; the clock returns monotonic seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        #: The end of each log, and since when it has not moved.
        self._ends: dict[TopicPartition, tuple[int, float]] = {}

    def watch(self, logs: Mapping[TopicPartition, Log]) -> None:
        """Note the ends of logs; log an end that does not move although records lie behind it."""
        now = self._clock()
        for part, log in logs.items():
            if part not in self._ends or self._ends[part][0] != log.end:
                self._ends[part] = log.end, now
        stalled = {part: log for part, log in logs.items() if now >= self._ends[part][1] + STALLED_S}
        warn_of_open_transactions(stalled, once_in(REPEAT_S, self, now))


def warn_of_open_transactions(logs: Mapping[TopicPartition, Log], ration: dict[str, Any] | None = None) -> None:
    """Log the partitions with records past the readable end; `ration` comes from `once_in`."""
    waiting = sorted(part for part, log in logs.items() if log.written > log.end)
    if not waiting:
        return
    topic, partition = first = waiting[0]
    _log.warning(
        "%s waits at offset %d: a transaction is open there; %d offsets wait behind it until its producer commits or "
        "aborts, or the broker ends it (transaction.timeout.ms)%s. To find the producer, and since when it is open: "
        "kafka-transactions.sh describe-producers --topic %s --partition %d",
        place(first),
        logs[first].end,
        logs[first].written - logs[first].end,
        f"; so do {len(waiting) - 1} other partitions" if len(waiting) > 1 else "",
        topic,
        partition,
        extra=ration,
    )
