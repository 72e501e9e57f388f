"""`ReportReader` reads the topic of reports to its end, then follows it."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Self

from confluent_kafka import TIMESTAMP_LOG_APPEND_TIME

from penstock.errors import TopicNotFoundError
from penstock.fleet.reports.group_state import Group, GroupStates
from penstock.fleet.topics import TopicFollower
from penstock.fleet_member import REPORTS_TOPIC
from penstock.options import ClientConfig

_POLL_S = 0.5


class ReportReader:
    """The state of all groups by the reports of their members. For one thread.

    Use it as a context manager: entering it reads the existing records, `follow` reads later ones. Records that are no
    reports are ignored and counted.

    Args:
        topic: name of the topic.

    Raises:
        BrokerConnectionError: no broker answered, or one stopped answering.
        TopicNotFoundError: no member has reported yet.
        MissingRightError: this user may not read the topic.
        PenstockError: the topic is gone, or the client failed.
        ConfigurationError: the client library refused a setting.
    """

    def __init__(self, bootstrap_servers: str, config: ClientConfig | None = None, topic: str = REPORTS_TOPIC) -> None:
        self._bootstrap_servers = bootstrap_servers
        self._config = config or {}
        self._topic = topic
        self._states = GroupStates()

    def __enter__(self) -> Self:
        """Read the existing records."""
        try:
            self._follower = TopicFollower(self._bootstrap_servers, self._config, self._topic, back=None)
        except TopicNotFoundError as error:
            raise TopicNotFoundError(
                f"no topic {self._topic} at {self._bootstrap_servers}: no member has reported yet; start apps with "
                "`penstock run --report` or App(report=True), or name the topic that they report to"
            ) from error
        try:
            while not self._follower.has_caught_up:
                self._poll(_POLL_S)
                self._follower.require_caught_up()
        except BaseException:
            self._follower.close()
            raise
        self._states.note_caught_up(time.monotonic())
        return self

    def __exit__(self, *_: object) -> None:
        self._follower.close()

    @property
    def trouble(self) -> str | None:
        """The reason why brokers do not answer, or None."""
        return self._follower.trouble

    @property
    def is_stale(self) -> bool:
        """Whether brokers do not answer."""
        return self.trouble is not None

    @property
    def ignored(self) -> Mapping[str, int]:
        """The number of ignored records, by reason."""
        return self._states.ignored

    def follow(self, timeout: float) -> bool:
        """Read new records for `timeout` seconds, or until one changes the state; return whether one did.

        While brokers do not answer, `trouble` has the reason and ages stand still. Reading goes on when they are back.
        """
        before = self._states.changes
        deadline = time.monotonic() + timeout
        while self._states.changes == before and (left := deadline - time.monotonic()) > 0:
            self._poll(min(_POLL_S, left))
        if self._follower.ask():  # a member counts as silent only if the brokers answer
            self._states.note_answer(self._follower.heard_at)
        return self._states.changes != before

    def settle(self, timeout: float, group: str | None = None) -> bool:
        """Follow until each member is known to be alive or silent; return False after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while not self._states.is_settled(time.monotonic(), group):
            if (left := deadline - time.monotonic()) <= 0:
                return False
            self.follow(min(_POLL_S, left))
        return True

    def groups(self) -> list[Group]:
        """Return all groups at this moment, sorted by name."""
        return self._states.groups(time.monotonic())

    def _poll(self, timeout: float) -> None:
        for message in self._follower.poll(timeout):
            kind, milliseconds = message.timestamp()
            appended = milliseconds / 1000 if kind == TIMESTAMP_LOG_APPEND_TIME else None
            self._states.add(message.key(), message.value(), appended, self._follower.heard_at)
