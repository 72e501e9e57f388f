"""The rights watch: which permissions a running consumer was refused, until they are granted.

All that a consumer needs is asked for before it starts (`startup_checks`). While it runs nothing is asked as long as
brokers refuse nothing. What they refuse to read, or the group, is logged with the command that grants it, and stands in
`explain` until it is granted; the client goes on by itself then. Writes that are refused are shown with the messages
that wait for them, by `DeadLetterPublisher` and `HandlerResults`.

A question about a group takes a client of its own, and librdkafka may end the process where the group's broker goes
away meanwhile (confluentinc/librdkafka#4605): one more reason not to ask without need.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from confluent_kafka import KafkaError, KafkaException

from penstock.clients.bounded_calls import NotAnsweredError
from penstock.clients.cluster import Answer
from penstock.clients.kafka_errors import reason
from penstock.clients.rights import Operation, Resource, Right, Rights, group_right, missing_right_text, topic_right

_log = logging.getLogger(__name__)

#: Seconds between two questions.
_EVERY_S = 4.0
#: Seconds between two log lines about the same missing right.
_LOG_AGAIN_S = 60.0


class RightsWatch:
    """On the poll thread only, save `trouble` and `is_shut_out`."""

    def __init__(self, group: str, principal: str, ask: Callable[[Iterable[Right]], Answer[Rights]]) -> None:
        self._group = group
        self._principal = principal
        self._ask = ask
        self._asked: Answer[Rights] | None = None
        self._next = 0.0
        # Rights that may be missing, for something was refused; and those that brokers said are. The second is
        # replaced as a whole: any thread reads it.
        self._suspected: set[Right] = set()
        self._missing: frozenset[Right] = frozenset()
        self._logged_at: dict[Right, float] = {}

    def refused(self, error: KafkaError, topic: str | None, now: float) -> str:
        """Take a refusal that the consumer has met; return what is missing and what grants it."""
        right = group_right(self._group)
        if error.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED and topic:
            right = topic_right(Operation.READ, topic)
        self._suspect(right)
        self._log_missing(right, now)
        return self._text(right)

    def group_refused(self) -> None:
        """Ask about the group: it refused a commit."""
        self._suspect(group_right(self._group))

    def _suspect(self, right: Right) -> None:
        self._suspected.add(right)
        self._next = 0.0

    def check(self, now: float) -> None:
        """Take the answer where there is one; ask again when it is time."""
        try:
            if self._asked is not None:
                found = self._asked.answer()
                if found is None:
                    return
                self._asked = None
                self._compare(found, now)
            if self._suspected and now >= self._next:
                self._next = now + _EVERY_S
                self._asked = self._ask(self._suspected)
        except (KafkaException, NotAnsweredError) as error:
            self._asked = None
            why = reason(error) if isinstance(error, KafkaException) else error
            _log.info("the rights of group %s are not known: %s", self._group, why)

    def _compare(self, found: Rights, now: float) -> None:
        # Where a right is not known, as while brokers are away, the last answer still counts.
        missing = self._missing.intersection(found.unknown).union(found.missing)
        for right in self._missing - missing:
            self._logged_at.pop(right, None)
            _log.info("%s has the right %s now: what waited for it goes on", self._principal, right)
        for right in missing:
            self._log_missing(right, now)
        self._missing = missing
        # A group that brokers say nothing of is let go: a client that joins it finds out.
        self._suspected.difference_update(found.held, (r for r in found.unknown if r.resource is Resource.GROUP))
        self._suspected |= missing

    def _log_missing(self, right: Right, now: float) -> None:
        """Log that a right is missing, unless that was done a moment ago."""
        if now - self._logged_at.get(right, -_LOG_AGAIN_S) >= _LOG_AGAIN_S:
            self._logged_at[right] = now
            _log.error("%s; it goes on by itself once it is given", self._text(right))

    def _text(self, right: Right) -> str:
        if right.resource is Resource.GROUP:
            what = f"group {self._group} can neither be joined nor commit"
        else:
            what = f"topic {right.name} cannot be read, so that nothing more of it is handled"
        return missing_right_text(what, [right], self._principal)

    def trouble(self, topic: str) -> str | None:
        """Return which rights are missing that a topic comes to a halt without, or None. Any thread."""
        stops = (group_right(self._group), topic_right(Operation.READ, topic))
        return "; ".join(self._text(right) for right in stops if right in self._missing) or None

    @property
    def is_shut_out(self) -> bool:
        """Whether the group is known to be closed to this client. Any thread."""
        return group_right(self._group) in self._missing
