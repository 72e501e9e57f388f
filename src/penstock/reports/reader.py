"""`ReportReader`: reads the topic of reports to its end, then follows it. It joins no group and writes nothing."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import Self

from confluent_kafka import OFFSET_BEGINNING, TIMESTAMP_LOG_APPEND_TIME, KafkaError, KafkaException, TopicPartition

from penstock import clients
from penstock.clients.kafka_errors import concerns_a_group, is_missing_right, reason
from penstock.clients.requests.answers import CONNECT_TIMEOUT_S
from penstock.clients.requests.topics import require_topics
from penstock.clients.rights import MissingRightError, Operation, principal_of, topic_right
from penstock.errors import BrokerConnectionError, TopicNotFoundError
from penstock.options import ClientConfig
from penstock.reports.group_state import Group, GroupStates
from penstock.reports.settings import DEFAULT_TOPIC

_SETTINGS = {
    "group.id": "penstock-reports",  # the client wants one; nothing is asked of it
    "enable.auto.commit": False,
    "auto.offset.reset": "earliest",
    "isolation.level": "read_uncommitted",
    "enable.partition.eof": True,
    "fetch.wait.max.ms": 100,
}
_BATCH = 500
_POLL_S = 0.5
#: Seconds without a record after which brokers are asked whether they are there, and that they have for the answer.
_ASK_AFTER_S = 3.0
_ANSWER_S = 2.0


class ReportReader:
    """The state of all groups, as their members tell it. For one thread.

    Use it as a context manager: entering it reads what is there; `follow` takes what comes later. What cannot be a
    report is passed over and counted by `states.ignored`.

    Args:
        bootstrap_servers: addresses of the brokers.
        config: client settings by librdkafka's names.
        topic: name of the topic.

    Raises:
        BrokerConnectionError: no broker answered, or one fell silent.
        TopicNotFoundError: nobody has reported yet.
        MissingRightError: this user may not read the topic.
        ConfigurationError: the client library refused a setting.
    """

    def __init__(self, bootstrap_servers: str, config: ClientConfig | None = None, topic: str = DEFAULT_TOPIC) -> None:
        self._bootstrap_servers = bootstrap_servers
        self._config = config or {}
        self._topic = topic
        self._principal = principal_of(self._config)
        self.states = GroupStates()
        #: Why brokers do not answer now, or None.
        self.trouble: str | None = None
        self._partitions: list[TopicPartition] = []
        self._at_end: set[int] = set()
        # Where the partitions ended at the start. Where many report, the client may never tell that it is at an end.
        self._ends: dict[int, int] = {}
        self._heard = time.monotonic()

    def __enter__(self) -> Self:
        """Read what is there."""
        admin = clients.admin(self._bootstrap_servers, self._config)
        try:
            counts = require_topics(admin, self._bootstrap_servers, [self._topic], principal=self._principal)
        except TopicNotFoundError as error:
            raise TopicNotFoundError(
                f"no topic {self._topic} at {self._bootstrap_servers}: nobody has reported yet; start apps with "
                "`penstock run --report` or App(report=True), or name the topic that they report to"
            ) from error
        self._consumer = clients.consumer(self._bootstrap_servers, {**self._config, **_SETTINGS})
        try:
            numbers = range(counts[self._topic])
            self._partitions = [TopicPartition(self._topic, number, OFFSET_BEGINNING) for number in numbers]
            self._consumer.assign(self._partitions)
            self._heard = time.monotonic()
            self._ends = self._known_ends()
            while len(self._at_end) < len(self._partitions):
                self._poll(_POLL_S)
                self._require_answers()
            self.states.caught_up(time.monotonic())
        except BaseException:
            self._consumer.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._consumer.close()

    def follow(self, timeout: float) -> bool:
        """Take what comes within `timeout` seconds; return at the first that changes something, with whether it did.

        Where brokers do not answer, `trouble` says why, ages stand still, and reading goes on when they are back.
        """
        before = self.states.changes
        deadline = time.monotonic() + timeout
        while self.states.changes == before and (left := deadline - time.monotonic()) > 0:
            self._poll(min(_POLL_S, left))
        if time.monotonic() - self._heard > _ASK_AFTER_S:
            self._ask()
        return self.states.changes != before

    def settle(self, timeout: float, group: str | None = None) -> bool:
        """Follow until of each member is known whether it lives or is silent; return whether that was in time."""
        deadline = time.monotonic() + timeout
        while not self.states.is_settled(time.monotonic(), group):
            if (left := deadline - time.monotonic()) <= 0:
                return False
            self.follow(min(_POLL_S, left))
        return True

    def groups(self) -> list[Group]:
        """Return all groups by name, at this moment."""
        return self.states.groups(time.monotonic())

    def _known_ends(self) -> dict[int, int]:
        """Return where the partitions end now, of those that are told in time."""
        ends = {}
        for part in self._partitions:
            with suppress(KafkaException, TypeError):  # the client returns None where it gave up
                ends[part.partition] = self._consumer.get_watermark_offsets(part, timeout=_ANSWER_S)[1]
        return ends

    def _require_answers(self) -> None:
        if time.monotonic() - self._heard > CONNECT_TIMEOUT_S:
            why = self.trouble or f"nothing of {self._topic} came for {CONNECT_TIMEOUT_S:g} s"
            raise BrokerConnectionError(f"no broker answered at {self._bootstrap_servers}: {why}")

    def _poll(self, timeout: float) -> None:
        for message in self._consumer.consume(_BATCH, timeout=timeout):
            error = message.error()
            if error is not None:
                self._take_error(error, message.partition())
                continue
            kind, milliseconds = message.timestamp()
            appended = milliseconds / 1000 if kind == TIMESTAMP_LOG_APPEND_TIME else None
            self._answered()
            number, offset = message.partition() or 0, message.offset() or 0
            if offset + 1 >= self._ends.get(number, offset + 2):
                self._at_end.add(number)
            self.states.take(message.key(), message.value(), appended, self._heard)

    def _take_error(self, error: KafkaError, partition: int | None) -> None:
        if error.code() == KafkaError._PARTITION_EOF:  # noqa: SLF001 - the library's public codes begin so
            self._at_end.add(partition or 0)
            self._answered()
        elif concerns_a_group(error):
            pass  # it is nobody's member; the client looks for its group's coordinator all the same
        elif is_missing_right(error):
            raise MissingRightError(
                f"{self._topic} may not be read", [topic_right(Operation.READ, self._topic)], self._principal
            )
        else:
            self.trouble = reason(error)

    def _answered(self) -> None:
        self._heard, self.trouble = time.monotonic(), None

    def _ask(self) -> None:
        """Ask whether brokers are there: none that is away can tell that a member is silent."""
        try:
            for part in self._partitions:
                _, end = self._consumer.get_watermark_offsets(part, timeout=_ANSWER_S)
                [at] = self._consumer.position([part])
                if at.offset < end:
                    return  # more is to be read first
        except (KafkaException, TypeError) as error:  # the client returns None where it gave up
            self.trouble = reason(error) if isinstance(error, KafkaException) else "no answer in time"
            return
        self._answered()
        self.states.heard(self._heard)
