"""A consumer group: its members, its committed offsets and their logs; and the change of its offsets.

Reading joins no group, so it disturbs no consumer. The group's coordinator refuses a commit from outside while the
group has members, so no member that joins meanwhile is overruled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, TypeVar

from confluent_kafka import ConsumerGroupState, IsolationLevel, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import OffsetSpec  # type: ignore[attr-defined] # not in its __all__

from penstock import clients
from penstock.clients.answers import answered
from penstock.clients.bounded_calls import ask_again
from penstock.clients.groups import HAS_MEMBERS, alter_group_offsets, committed_offsets, describe_groups
from penstock.clients.kafka_errors import code_of, is_missing_right, is_transient, reason
from penstock.clients.rights import (
    MissingRightError,
    Operation,
    Right,
    group_right,
    principal_of,
    require_rights,
    topic_right,
)
from penstock.clients.topics import known_offsets, log_bounds, log_ends, partition_counts, require_topics
from penstock.errors import BrokerConnectionError, PenstockError
from penstock.group_offsets.planning import Change, refuse_coordinators, reset
from penstock.group_offsets.positions import Member, Part, Position, position
from penstock.group_offsets.targets import Target, To, chosen, target, topic_choice
from penstock.options import ClientConfig, not_empty
from penstock.places import counted, place_text

#: The timeout of one answer in seconds, the budget of repeated requests, and the delay between them.
_ANSWER_S = 15.0
_RETRY_BUDGET_S = 15.0
_RETRY_DELAY_S = 0.2

#: The description of a group that brokers do not know.
_ABSENT = SimpleNamespace(state=ConsumerGroupState.UNKNOWN, members=())

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class GroupState:
    """The state of a group by the brokers' answers."""

    group: str
    #: The state by Kafka's names, for example `stable` or `empty`.
    state: str
    members: tuple[Member, ...]
    #: The named partitions; by default all partitions of topics that the group has offsets of, or its members read.
    positions: tuple[Position, ...]


class Group:
    """A consumer group. For one thread.

    `ConfigurationError` if a setting was refused, or the name of the group is empty.
    """

    def __init__(self, bootstrap_servers: str, config: ClientConfig, group: str) -> None:
        not_empty("the group", group)
        self._admin = clients.admin(bootstrap_servers, config)
        self._group = group
        is_uncommitted = config.get("isolation.level") == "read_uncommitted"
        self._isolation = IsolationLevel.READ_UNCOMMITTED if is_uncommitted else IsolationLevel.READ_COMMITTED

    def state(self, topics: Sequence[str] | None = None, *, to_change: bool = False) -> GroupState:
        """Return the members, and the positions in the named topics and partitions (in the form of `--topic`).

        Without names, it takes all partitions of the topics that the group has offsets of or reads.

        Raises:
            BrokerConnectionError: a broker did not answer.
            MissingRightError: this user lacks a permission to read, or with `to_change` to commit these offsets.
            ConfigurationError: a name is invalid, or a topic has no such partition.
            PenstockError: there is no such topic, the group is unknown, or the brokers refused.
        """
        choices = [topic_choice(text) for text in topics or ()]
        names = list(dict.fromkeys(choice.topic for choice in choices))
        if names:
            counts = require_topics(self._admin, names, to=Operation.DESCRIBE)
            parts = chosen(choices, counts)
        else:
            counts = partition_counts(self._admin)
            parts = [(topic, number) for topic, count in sorted(counts.items()) for number in range(count)]
        if to_change:
            what = f"the offsets of group {self._group} cannot be changed"
            require_rights(self._admin, what, self._rights(Operation.READ, names))
        state, members = self._described()
        committed = self._committed(parts)
        if not names:
            read = {topic for topic, _ in committed} | {part[0] for member in members for part in member.partitions}
            parts = [part for part in parts if part[0] in read]
        logs = self._offsets(parts, lambda: log_bounds(self._admin, parts, _ANSWER_S))
        positions = [
            position(self._group, part, committed.get(part), range(start, max(start, end)))
            for part, (start, end) in sorted(logs.items())
        ]
        if not positions and not members:
            raise PenstockError(
                f"group {self._group} has no members, and no offsets of topics that this user may see; correct the "
                "name (that of the App), or name a topic with --topic to learn which permission is missing"
            )
        return GroupState(self._group, state, members, tuple(positions))

    def planned_reset(
        self, to: str, topics: Sequence[str] | None, *, keep_done: bool
    ) -> tuple[GroupState, list[Change]]:
        """Return the present state of the group, and the changes that a reset would make.

        Args:
            to: the new position, in the form of `penstock offsets reset --to`.
            topics: topics and partitions, in the form of `--topic`; None: all that the group has offsets of.
            keep_done: whether offsets done above the commit point stay done.

        Raises:
            ConfigurationError: `to` or a topic is invalid, or an offset lies outside of its log.
            PenstockError: the errors of `state`.
        """
        aim = target(to)
        state = self.state(topics, to_change=True)
        parts = [position.part for position in state.positions]
        found = self._find(aim, parts) if aim.to in {To.LATEST, To.TIME} else {}
        refuse_coordinators(self._group, [topic for topic, _ in parts])
        return state, reset(self._group, aim, state.positions, found, keep_done=keep_done)

    def write(self, state: GroupState, changes: Sequence[Change], *, doubt: str = "") -> None:
        """Commit offsets and offset maps of the group, for all these partitions in one request.

        `doubt` is the beginning of the error text if no answer came.

        `BrokerConnectionError` if no answer came: the changes may be written or not. `PenstockError` if the group has
        members. `PenstockError` or `MissingRightError` with the refused partitions if some were refused.
        """
        if state.members:
            raise PenstockError(
                f"the offsets of group {self._group} were not changed: it has {counted(len(state.members), 'member')}: "
                f"{', '.join(map(str, state.members))}; stop all members of the group, and run the command again (a "
                "killed member counts until its session ends, after 15 s by default)"
            )
        if not changes:
            return
        wanted = [TopicPartition(*change.before.part, change.offset, metadata=change.metadata) for change in changes]
        what = doubt or f"the offsets of group {self._group} may be changed or not"
        rights = self._rights(Operation.READ, {change.before.topic for change in changes})

        def ask() -> list[TopicPartition]:
            return list(answered(alter_group_offsets(self._admin, self._group, wanted), _ANSWER_S).topic_partitions)

        def is_final(answer: list[TopicPartition]) -> bool:
            # Writing is idempotent, so the whole request is repeated if one error is transient.
            return not any(partition.error and is_transient(partition.error) for partition in answer)

        answer = self._answer(ask, what, rights, until=is_final)
        refused = [partition for partition in answer if partition.error is not None]
        if not refused:
            return
        error = KafkaException(refused[0].error)
        places = ", ".join(place_text(partition.topic, partition.partition) for partition in refused)
        written = len(changes) - len(refused)
        what = f"group {self._group}: the offsets of {places} were refused, and {written} written"
        raise self._failure(error, what, rights) from error

    def _described(self) -> tuple[str, tuple[Member, ...]]:
        def ask() -> Any:
            return answered(describe_groups(self._admin, [self._group])[self._group], _ANSWER_S)

        what = f"group {self._group} cannot be read"
        found = self._answer(ask, what, self._rights(Operation.DESCRIBE), absent=_ABSENT)
        members = tuple(
            Member(
                member.client_id,
                member.host,
                member.group_instance_id,
                frozenset((part.topic, part.partition) for part in member.assignment.topic_partitions),
            )
            for member in found.members
        )
        state = found.state if isinstance(found.state, ConsumerGroupState) else ConsumerGroupState.UNKNOWN
        return state.name.lower().replace("_", " "), members

    def _committed(self, parts: Iterable[Part]) -> dict[Part, tuple[int, str | None]]:
        places = [TopicPartition(*part) for part in sorted(parts)]
        if not places:
            return {}

        def ask() -> list[TopicPartition]:
            asking = self._admin.servers, self._admin.config, self._group, places
            try:
                # Stable offsets only: an open transaction may replace its offsets when it ends.
                found = committed_offsets(*asking, _RETRY_BUDGET_S)
            except KafkaException as error:
                if code_of(error) != KafkaError._TIMED_OUT:  # noqa: SLF001 - public constants look so
                    raise
                # The library waits for open transactions in silence. If brokers answer without the wait, that is it.
                committed_offsets(*asking, _ANSWER_S, stable=False)
                raise KafkaException(KafkaError(KafkaError.UNSTABLE_OFFSET_COMMIT)) from error
            for partition in found:
                if partition.error is not None:
                    raise KafkaException(partition.error)
            return found

        what = f"the offsets of group {self._group} are unknown"
        committed = self._answer(ask, what, self._rights(Operation.DESCRIBE), absent=list[TopicPartition]())
        return {
            (offset.topic, offset.partition): (offset.offset, offset.metadata)
            for offset in committed
            if offset.offset >= 0
        }

    def _find(self, aim: Target, parts: Sequence[Part]) -> dict[Part, int]:
        """Return the latest offset of each partition, or its first offset of a time.

        Under read_committed the latest offset is the start of an open transaction, so its messages are not skipped.
        """
        latest = self._offsets(parts, lambda: log_ends(self._admin, parts, _ANSWER_S, self._isolation))
        if aim.to is To.LATEST:
            return latest
        specs = dict.fromkeys(parts, OffsetSpec.for_timestamp(aim.number))
        found = self._offsets(parts, lambda: known_offsets(self._admin, specs, _ANSWER_S))
        return {part: latest[part] if offset < 0 else offset for part, offset in found.items()}

    def _offsets(self, parts: Sequence[Part], ask: Callable[[], dict[Part, T]]) -> dict[Part, T]:
        """Return the brokers' answer on the logs of partitions."""
        topics = sorted({topic for topic, _ in parts})
        what = f"the ends of the logs of {', '.join(topics)} are unknown"
        return self._answer(ask, what, [topic_right(Operation.DESCRIBE, topic) for topic in topics]) if parts else {}

    def _rights(self, operation: Operation, topics: Iterable[str] = ()) -> list[Right]:
        return [group_right(self._group, operation), *(topic_right(operation, topic) for topic in sorted(topics))]

    def _answer(
        self,
        ask: Callable[[], T],
        what: str,
        rights: Sequence[Right],
        *,
        absent: T | None = None,
        until: Callable[[T], bool] = lambda _: True,
    ) -> T:
        """Return an answer; ask again for some seconds after a transient error, or until `until` accepts the answer.

        If the brokers do not know the group, it returns `absent`.
        """
        try:
            return ask_again(ask, _RETRY_BUDGET_S, _RETRY_DELAY_S, until=until, passes=_may_pass)
        except KafkaException as error:
            if absent is not None and code_of(error) == KafkaError.GROUP_ID_NOT_FOUND:
                return absent
            raise self._failure(error, what, rights) from error

    def _failure(self, error: KafkaException, what: str, rights: Sequence[Right]) -> PenstockError:
        code = code_of(error)
        if is_missing_right(error):
            return MissingRightError(what, rights, principal_of(self._admin.config))
        if code in HAS_MEMBERS:
            return PenstockError(
                f"{what}: a member joined meanwhile; stop all members of the group, and run the command again"
            )
        if code == KafkaError.OFFSET_METADATA_TOO_LARGE:
            return PenstockError(
                f"{what}: the brokers accept less metadata than an offset map has; set offset.metadata.max.bytes to "
                "4096 on them and run the command again, or leave out the offsets done above the commit point"
            )
        if code == KafkaError.UNSTABLE_OFFSET_COMMIT:
            return PenstockError(
                f"{what}: a transaction with some of them is still open; it ends by its timeout at the latest; then "
                "run the command again"
            )
        if _may_pass(error):
            return BrokerConnectionError(
                f"{what} by {self._admin.servers}: {reason(error)}; check that the brokers run, and run the command "
                "again"
            )
        return PenstockError(f"{what}: {reason(error)}; check the brokers, and run the command again")


def _may_pass(error: BaseException) -> bool:
    if not isinstance(error, KafkaException):
        return False
    return is_transient(error) or code_of(error) == KafkaError.UNSTABLE_OFFSET_COMMIT
