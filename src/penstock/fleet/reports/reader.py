"""`ReportReader`: reads the topic of reports to its end, then follows it. It joins no group and writes nothing."""

from __future__ import annotations

import time
from typing import Self

from confluent_kafka import OFFSET_BEGINNING, TIMESTAMP_LOG_APPEND_TIME, KafkaError, KafkaException

from penstock import clients
from penstock.clients.kafka_errors import ErrorKind, reason
from penstock.clients.reading import PartitionReader, Place
from penstock.clients.requests.answers import CONNECT_TIMEOUT_S, asked_until_ready
from penstock.clients.requests.topics import require_topics
from penstock.clients.rights import MissingRightError, Operation, principal_of, topic_right
from penstock.errors import BrokerConnectionError, TopicNotFoundError
from penstock.fleet.reports.group_state import Group, GroupStates
from penstock.fleet_member import REPORTS_TOPIC
from penstock.options import ClientConfig

#: The client wants one; nothing is asked of it.
_GROUP = "penstock-reports"
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

    def __init__(self, bootstrap_servers: str, config: ClientConfig | None = None, topic: str = REPORTS_TOPIC) -> None:
        self._bootstrap_servers = bootstrap_servers
        self._config = config or {}
        self._topic = topic
        self._principal = principal_of(self._config)
        self.states = GroupStates()
        self._partitions = range(0)

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
        self._partitions = range(counts[self._topic])
        self._reader = PartitionReader(
            self._bootstrap_servers,
            self._config,
            _GROUP,
            self._not_read,
            isolation="read_uncommitted",
            given={"fetch.wait.max.ms": 100},
        )
        try:
            self._read_to_end()
        except BaseException:
            self._reader.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._reader.close()

    @property
    def trouble(self) -> str | None:
        """Why brokers do not answer now, or None."""
        return self._reader.trouble

    def follow(self, timeout: float) -> bool:
        """Take what comes within `timeout` seconds; return at the first that changes something, with whether it did.

        Where brokers do not answer, `trouble` says why, ages stand still, and reading goes on when they are back.
        """
        before = self.states.changes
        deadline = time.monotonic() + timeout
        while self.states.changes == before and (left := deadline - time.monotonic()) > 0:
            self._poll(min(_POLL_S, left))
        if time.monotonic() - self._reader.heard_at > _ASK_AFTER_S:
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

    def _read_to_end(self) -> None:
        try:
            told = asked_until_ready(lambda: self._ends(CONNECT_TIMEOUT_S), CONNECT_TIMEOUT_S)
        except KafkaException as error:
            raise self._silent(reason(error)) from error
        # Where many report, the client may never tell that it is at an end.
        ends = {(self._topic, number): end for number, end in told.items()}
        self._reader.start(dict.fromkeys(ends, OFFSET_BEGINNING), ends)
        while self._reader.behind:
            self._poll(_POLL_S)
            if time.monotonic() - self._reader.heard_at > CONNECT_TIMEOUT_S:
                raise self._silent(self.trouble or f"nothing of {self._topic} came for {CONNECT_TIMEOUT_S:g} s")
        self.states.caught_up(time.monotonic())

    def _ends(self, limit_s: float) -> dict[int, int]:
        """Return where the partitions end now; `KafkaException` where brokers do not tell."""
        bounds = self._reader.bounds(self._topic, self._partitions, limit_s)
        return {number: end for number, (_, end) in bounds.items()}

    def _silent(self, why: str) -> BrokerConnectionError:
        return BrokerConnectionError(f"no broker answered at {self._bootstrap_servers}: {why}")

    def _poll(self, timeout: float) -> None:
        for message in self._reader.poll(timeout):
            kind, milliseconds = message.timestamp()
            appended = milliseconds / 1000 if kind == TIMESTAMP_LOG_APPEND_TIME else None
            self.states.take(message.key(), message.value(), appended, self._reader.heard_at)

    def _not_read(self, kind: ErrorKind, _error: KafkaError, _place: Place) -> None:
        if kind is ErrorKind.MISSING_RIGHT:
            raise MissingRightError(
                f"{self._topic} may not be read", [topic_right(Operation.READ, self._topic)], self._principal
            )

    def _ask(self) -> None:
        """Ask whether brokers are there: none that is away can tell that a member is silent."""
        try:
            ends = self._ends(_ANSWER_S)
        except KafkaException as error:
            self._reader.trouble = reason(error)
            return
        if any(self._reader.positions[self._topic, number] < end for number, end in ends.items()):
            return  # more is to be read first
        self._reader.note_answer()
        self.states.heard(self._reader.heard_at)
