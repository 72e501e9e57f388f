"""The position of a query as offsets of a consumer group, so that ordinary lag tools see it.

The offsets are for onlookers: a query begins where its checkpoint or its sink's ledger says, never at these. They are
written after a batch was committed, to a group that has no members, and never backwards.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import TypeVar

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from penstock import clients
from penstock.clients.asking import ask_again
from penstock.clients.kafka_errors import is_missing_right, reason
from penstock.clients.reading import reading_settings
from penstock.clients.requests.answers import answered
from penstock.clients.requests.granted_rights import missing_rights
from penstock.clients.requests.group_requests import GroupAdmin, alter_group_offsets
from penstock.clients.rights import Operation, Right, group_right, missing_right_text, principal_of, topic_right
from penstock.options import ClientConfig, not_empty
from penstock.spark_sink.source.plan import Offsets
from penstock.spark_sink.source.plan import TopicPartition as Part

T = TypeVar("T")

_log = logging.getLogger("penstock.spark_sink")

#: Seconds the brokers may take for an answer.
_ANSWER_S = 20.0

#: What passes by itself: the group's coordinator is being made, moves, or reads its log.
_PASSES = (
    KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
    KafkaError.COORDINATOR_NOT_AVAILABLE,
    KafkaError.NOT_COORDINATOR,
    KafkaError._WAIT_COORD,  # noqa: SLF001 - the client library's public names for its own errors begin so
)
#: Seconds that this is waited for, and between two tries.
_PASSES_S, _AGAIN_S = 8.0, 0.2

#: How a broker refuses offsets for a group that has members: only they may commit then.
_HAS_MEMBERS = (
    KafkaError.UNKNOWN_MEMBER_ID,
    KafkaError.NON_EMPTY_GROUP,
    KafkaError.ILLEGAL_GENERATION,
    KafkaError.REBALANCE_IN_PROGRESS,
)


class GroupOffsets:
    """Writes the position of one query to one group, which belongs to it alone. For one thread.

    Nothing is raised once it is made: offsets that cannot be written cost a warning, and the next batch writes later
    ones. An empty name or a setting that the client refuses is a `ConfigurationError`.
    """

    def __init__(self, group: str, *, bootstrap_servers: str, config: ClientConfig | None = None) -> None:
        not_empty("group", group)
        self.group = group
        self._make_admin = partial(clients.admin, bootstrap_servers, config or {})
        self._admin = GroupAdmin(self._make_admin)
        self._principal = principal_of(config or {})
        # Reads what the group has, and joins nothing. The admin client's way of asking may end the process: see
        # `group_requests`, confluent-kafka-python 1982, confluent-kafka-javascript 374.
        self._reader: Consumer = clients.consumer(bootstrap_servers, reading_settings(config or {}, group))
        #: Kinds of complaints that were made since it last went well.
        self._warned: set[str] = set()

    def warn_missing_rights(self, topics: Iterable[str]) -> None:
        """Warn where offsets of these topics may not be written to the group: they would be missing in silence."""
        try:
            missing = missing_rights(self._make_admin(), _needed(self.group, topics))
        except KafkaException:
            return  # the first offsets tell
        if missing:
            self._warn_missing(missing)

    def advance(self, position: Mapping[Part, int]) -> Offsets:
        """Write the offsets that lie above the group's, and return them; none where that was refused."""
        try:
            committed = _retried(lambda: self._committed(list(position)))
            behind = sorted(part for part, offset in position.items() if offset < committed.get(part, 0))
            if behind:
                topic, partition = behind[0]
                self._warn_once(
                    "behind",
                    f"group {self.group} is at offset {committed[behind[0]]} of {topic}[{partition}], the query at "
                    f"{position[behind[0]]}: its offsets are not moved back. The query reads again, the topic was made "
                    "anew, or another one uses the group; reset the group's offsets by hand if that is meant",
                )
            wanted = {part: offset for part, offset in position.items() if offset > committed.get(part, -1)}
            if wanted:
                _retried(lambda: self._write(wanted))
        except KafkaException as error:
            self._admin.renew()
            if _code(error) in _HAS_MEMBERS:
                self._warn_once(
                    "members",
                    f"group {self.group} has members, so the query's position is not written to it: they alone may "
                    "commit. Give the sink a group of its own",
                )
            else:
                self._warn_failure(error, {topic for topic, _ in position})
            return {}
        # What fails after it has gone well is logged again.
        self._warned &= {"behind"} if behind else set()
        return wanted

    def close(self) -> None:
        """Let the connections go."""
        self._reader.close()

    def _committed(self, parts: Sequence[Part]) -> Offsets:
        found = self._reader.committed([TopicPartition(*part) for part in parts], timeout=_ANSWER_S)
        return {(one.topic, one.partition): one.offset for one in found if one.error is None and one.offset >= 0}

    def _write(self, position: Offsets) -> None:
        wanted = [TopicPartition(topic, partition, offset) for (topic, partition), offset in sorted(position.items())]
        for one in answered(alter_group_offsets(self._admin.client, self.group, wanted), _ANSWER_S).topic_partitions:
            if one.error is not None:
                raise KafkaException(one.error)

    def _warn_failure(self, error: KafkaException, topics: Iterable[str]) -> None:
        """Log why offsets were not written; the client waits in silence for a coordinator that it may not look up."""
        needed = _needed(self.group, topics)
        missing = missing_rights(self._make_admin(), needed) or (needed if is_missing_right(error) else [])
        if missing:
            self._warn_missing(missing)
            return
        self._warn_once(
            "broker",
            f"the query's position was not written to group {self.group}: {reason(error)}; the next batch tries again",
        )

    def _warn_missing(self, missing: Sequence[Right]) -> None:
        what = f"the query's position is not written to group {self.group}, until the right is given"
        text = missing_right_text(what, missing, self._principal)
        self._warn_once(text, text)

    def _warn_once(self, kind: str, what: str) -> None:
        level = logging.DEBUG if kind in self._warned else logging.WARNING
        self._warned.add(kind)
        _log.log(level, "%s", what)


def _needed(group: str, topics: Iterable[str]) -> list[Right]:
    """Return the rights that it takes to commit offsets."""
    return [group_right(group), *(topic_right(Operation.READ, topic) for topic in sorted(topics))]


def _retried(ask: Callable[[], T]) -> T:
    """Return the answer; ask again while the group has no coordinator, for some seconds."""
    return ask_again(
        ask,
        _PASSES_S,
        _AGAIN_S,
        until=lambda _answer: True,
        passes=lambda error: isinstance(error, KafkaException) and _code(error) in _PASSES,
    )


def _code(error: KafkaException) -> int | None:
    inner = error.args[0] if error.args else None
    return inner.code() if isinstance(inner, KafkaError) else None
