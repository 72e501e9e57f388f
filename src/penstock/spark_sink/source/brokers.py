"""What the driver asks of Kafka: which partitions a query reads, where their logs begin and end, and what is gone.

Under read_committed a log ends at its last stable offset: an open transaction holds it there. From outside such a query
looks idle while messages pile up, so the driver logs it; the client library cannot ask whose transaction it is, Kafka's
own tool can. Offsets are asked of the admin side: for all partitions together, with either isolation.

The query's position in a topic that was deleted is kept: forgotten, it would begin at 0 again when the topic is back.
Its id tells whether it is the same topic then.
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
from penstock.spark_sink.source.plan import Log, Offsets, TopicPartition, place

_log = rationed("penstock.spark_sink")

#: Seconds for one question of a running query: a broker that is gone does not answer, and the next question goes to
#: another one.
_QUESTION_TIMEOUT_S = 3.0

_UNCOMMITTED = IsolationLevel.READ_UNCOMMITTED

#: Seconds a log's end stands still before that is logged, and between two lines that say the same.
STALLED_S = 10.0
REPEAT_S = 60.0


@dataclass(frozen=True, slots=True)
class View:
    """What the brokers say of all that a query reads, at one moment.

    Attributes:
        logs: where the log of each partition begins and ends.
        ids: the ids of topics, which a topic that is created again does not keep; none from brokers that have none.
        refused: why other topics cannot be seen, or not read.
    """

    logs: Mapping[TopicPartition, Log]
    ids: Mapping[str, str]
    refused: Mapping[str, KafkaException]

    def is_unknown(self, topic: str) -> bool:
        """Tell whether the brokers say that there is no such topic, rather than that it may not or cannot be seen."""
        error = self.refused.get(topic)
        return error is not None and error.args[0].code() == KafkaError.UNKNOWN_TOPIC_OR_PART


class OffsetReader:
    """Answers the driver's questions about one query's topics and offsets. One thread uses it.

    A `kafka.` option that the client library refuses is a `ConfigurationError`. Each question may raise
    `BrokerConnectionError` where no broker answers, `SourceError` where a leader does not, and `MissingRightError`.
    """

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        self._isolation = IsolationLevel.READ_COMMITTED if options.read_committed else _UNCOMMITTED
        self._make_admin = partial(clients.admin, options.bootstrap_servers, options.client)
        try:
            # The library checks the settings of tasks here, so that no task starts with wrong ones.
            clients.consumer(options.bootstrap_servers, options.consumer_config).close()
            self._admin = self._make_admin()
        except clients.ClientRefusedError as refused:
            raise ConfigurationError(
                f"an option kafka.* is wrong: {refused} (names are librdkafka's. Instead of the Java client's "
                "sasl.jaas.config set sasl.username and sasl.password, or what sasl.oauthbearer.* and sasl.kerberos.* "
                "need; instead of a trust store ssl.ca.location or ssl.ca.pem, in PEM; a key store must be PKCS#12)"
            ) from None

    def first_view(self) -> View:
        """Return what a query reads as it begins: all of it must be there, and be seen; raises as `require_seen`."""
        view = self._view(CONNECT_TIMEOUT_S)
        try:
            require_seen(self._admin, view.refused)
        except TopicNotFoundError as error:
            raise TopicNotFoundError(f"the option subscribe names what is not there: {error}") from None
        return view

    def view(self, expected: Collection[str] = ()) -> View:
        """Return what there is of all that the query reads, and why the rest cannot be seen.

        Topics that are expected are asked for again, as often as the options say: a broker may not know them, or not
        answer, for a moment.
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
            # Numbers below zero are the client's own errors: no broker has said anything.
            if refused and not found and all(error.args[0].code() < 0 for error in refused.values()):
                raise next(iter(refused.values()))
            return found, refused

        try:
            found, refused = first_answer(self._admin, timeout_s, ask)
        except BrokerConnectionError:
            # The library goes on asking the node that it took for the controller, though that one is away (2.16, seen
            # for 87 s): another client asks who that is.
            self._admin = self._make_admin()
            raise
        for name in [name for name, topic in found.items() if may_only_be_seen(topic)]:
            # Planned all the same, its tasks would fail one after the other.
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
        # The answers are not of one moment.
        return {part: Log(begin[part], end[part], max(end[part], written[part])) for part in parts}

    def at_time(self, time_ms: int, parts: Iterable[TopicPartition]) -> Offsets:
        """Return the first offset at or after a time of each partition, -1 where no message is as late."""
        time: OffsetSpec = OffsetSpec.for_timestamp(time_ms)
        return self._offsets(parts, time)

    def _offsets(
        self, parts: Iterable[TopicPartition], spec: OffsetSpec, isolation: IsolationLevel | None = None
    ) -> Offsets:
        """Ask for offsets, and again as often as the options say where a broker did not answer."""
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
        # DESCRIBE is all that looking takes; a reader needs READ, which includes it.
        rights = [topic_right(Operation.READ, topic) for topic in topics]
        return MissingRightError(what, rights, principal_of(self._options.client))


def _may_pass(error: BaseException) -> bool:
    cause = error.__cause__
    return isinstance(error, SourceError) and isinstance(cause, KafkaException) and is_transient(cause)


class GoneTopics:
    """Knows the topics of one query in one run, and which of them are gone. One thread uses it."""

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        #: The ids of topics as they were last seen in this run.
        self._ids: dict[str, str] = {}
        #: The topics of which something was reported gone and is not back.
        self.reported: set[str] = set()

    def fixed(self, begun: Offsets, view: View) -> Offsets:
        """Return where the query stays in partitions that have no log, and 0 for those of a topic that is another now.

        A topic under the same name with another id is read from its beginning. Each loss is reported once, and raises
        as `report_gone` where it ends the query.
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
                fixed[part] = 0 if is_another else offset
        self._ids |= view.ids
        self.reported = gone
        return fixed


def report_gone(options: SourceOptions, part: TopicPartition, read: str, view: View) -> None:
    """Report a partition that cannot be seen; `read` begins the sentence.

    Raises `MissingRightError` or `SourceError` where it is only hidden, and `DataLossError` where it is gone, unless
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
    """Watches where logs may be read to. One thread uses it; the clock counts monotonic seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        #: The end of each log, and since when it has been there.
        self._ends: dict[TopicPartition, tuple[int, float]] = {}

    def watch(self, logs: Mapping[TopicPartition, Log]) -> None:
        """Note where logs end; log it where an end does not move though something stands behind it."""
        now = self._clock()
        for part, log in logs.items():
            if part not in self._ends or self._ends[part][0] != log.end:
                self._ends[part] = log.end, now
        stalled = {part: log for part, log in logs.items() if now >= self._ends[part][1] + STALLED_S}
        warn_of_open_transactions(stalled, once_in(REPEAT_S, self, now))


def warn_of_open_transactions(logs: Mapping[TopicPartition, Log], ration: dict[str, Any] | None = None) -> None:
    """Log in which partitions something was written past the end that may be read; `ration` is of `once_in`."""
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
