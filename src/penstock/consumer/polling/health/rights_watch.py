"""The rights watch: which rights a consumer needs, and which of them it lacks while it runs.

A missing right shows in many places: a fetch, a heartbeat, a commit, a dead letter; some of them raise nothing. So the
brokers are asked every few seconds what this client may do. What is missing is logged once, stands in `explain` as long
as it is missing, and is logged again when it was given. The client goes on by itself then.

Of the group they are asked only once it has refused something, as it refuses commits: such a question takes a client of
its own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping

from confluent_kafka import KafkaError, KafkaException

from penstock.clients.bounded_calls import NotAnsweredError
from penstock.clients.cluster import Answer
from penstock.clients.kafka_errors import reason
from penstock.clients.requests.granted_rights import Rights
from penstock.clients.rights import (
    MissingRightError,
    Operation,
    Resource,
    Right,
    group_right,
    missing_right_text,
    topic_right,
)

_log = logging.getLogger(__name__)

#: Seconds between two questions.
_EVERY_S = 4.0
#: Seconds between two log lines about the same missing right.
_LOG_AGAIN_S = 60.0

_WHAT_IS_DENIED = {
    Operation.READ: "read, so that nothing more of it is handled",
    Operation.WRITE: "written, so that the messages which are for it, or whose results are, wait or fail",
}


def needed_rights(group: str, consumed: Iterable[str], written: Mapping[str, Iterable[str]]) -> dict[Right, list[str]]:
    """Return what a consumer has to be allowed, and of each right which topics come to a halt without it.

    `written` are topics of dead letters, retries and results, each with those whose messages they are of.
    """
    consumed = list(consumed)
    needed = {group_right(group): consumed}
    needed |= {topic_right(Operation.READ, topic): [topic] for topic in consumed}
    needed |= {topic_right(Operation.WRITE, topic): list(sources) for topic, sources in written.items()}
    return needed


class RightsWatch:
    """Asks for the rights of a consumer. On the poll thread once that runs, save `trouble` and `is_shut_out`."""

    def __init__(
        self,
        group: str,
        needed: Mapping[Right, list[str]],
        principal: str,
        ask: Callable[[Iterable[Right]], Answer[Rights]],
    ) -> None:
        self._group = group
        self._needed = needed
        self._principal = principal
        self._ask = ask
        self._asked: Answer[Rights] | None = None
        self._next = 0.0
        # What was missing at the last answer. Replaced as a whole, so that any thread may read it.
        self._missing: tuple[Right, ...] = ()
        # Whether the group has refused something, and is not known to have let this client in since.
        self._suspects_group = False
        # When each was logged last.
        self._logged_at: dict[Right, float] = {}

    def need(self, needed: Mapping[Right, list[str]]) -> None:
        """Ask for these rights from now on: the topics that are consumed have changed."""
        self._needed = needed
        self._missing = tuple(right for right in self._missing if right in needed)

    def require(self, only: Iterable[Right] | None = None) -> tuple[Right, ...]:
        """Ask for these rights, or for all, and wait for the answer; return which of them are unknown.

        Raises `MissingRightError` where some are missing; all those are named.
        """
        try:
            found = self._ask(self._needed if only is None else only).wait()
        except KafkaException as error:
            _log.info("the rights of group %s are not known: %s", self._group, reason(error))
            return ()
        if found.missing:
            raise MissingRightError(f"group {self._group} cannot start", found.missing, self._principal)
        return found.unknown

    def check_now(self) -> None:
        """Ask at the next `check`, of the group as well: something was refused."""
        self._next, self._suspects_group = 0.0, True

    def check(self, now: float) -> None:
        """Take the answer where there is one; ask again when it is time."""
        try:
            if self._asked is not None:
                found = self._asked.answer()
                if found is None:
                    return
                self._asked = None
                self._compare(found, now)
            if now >= self._next:
                self._next = now + _EVERY_S
                suspects = self._suspects_group
                self._asked = self._ask(
                    [right for right in self._needed if suspects or right.resource is not Resource.GROUP]
                )
        except (KafkaException, NotAnsweredError) as error:
            self._asked = None
            why = reason(error) if isinstance(error, KafkaException) else error
            _log.info("the rights of group %s are not known: %s", self._group, why)

    def _compare(self, found: Rights, now: float) -> None:
        # Where a right is not known, as while brokers are away, the last answer still counts. And some that were asked
        # for may not be needed any more.
        missing = (*found.missing, *(right for right in self._missing if right in found.unknown))
        missing = tuple(right for right in missing if right in self._needed)
        for right in self._missing:
            if right not in missing:
                self._logged_at.pop(right, None)
                _log.info("%s has the right %s now: what waited for it goes on", self._principal, right)
        for right in missing:
            self._log_missing(right, now)
        self._missing = missing
        if any(right.resource is Resource.GROUP for right in found.held):
            self._suspects_group = False

    def _log_missing(self, right: Right, now: float) -> None:
        """Log that a right is missing, unless that was done a moment ago."""
        if now - self._logged_at.get(right, -_LOG_AGAIN_S) >= _LOG_AGAIN_S:
            self._logged_at[right] = now
            _log.error("%s; it goes on by itself once it is given", self._text(right))

    def _text(self, right: Right) -> str:
        if right.resource is Resource.GROUP:
            what = f"group {self._group} can neither be joined nor commit"
        else:
            what = f"topic {right.name} cannot be {_WHAT_IS_DENIED[right.operation]}"
        return missing_right_text(what, [right], self._principal)

    def trouble(self, topic: str) -> str | None:
        """Return which rights are missing that a topic comes to a halt without, or None. Any thread."""
        needed = self._needed
        return "; ".join(self._text(right) for right in self._missing if topic in needed.get(right, ())) or None

    @property
    def is_shut_out(self) -> bool:
        """Whether the group is known to be closed to this client. Any thread."""
        return any(right.resource is Resource.GROUP for right in self._missing)

    def refused(self, error: KafkaError, topic: str | None, now: float) -> str:
        """Take a refusal that the consumer has met; return what is missing and what gives it."""
        self.check_now()
        right = group_right(self._group)
        if error.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED and topic:
            right = topic_right(Operation.READ, topic)
        self._log_missing(right, now)
        return self._text(right)
