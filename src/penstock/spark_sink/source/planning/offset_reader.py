"""What the driver asks of Kafka: which partitions there are, where their logs begin and where they end.

Under read_committed a log ends at its last stable offset: an open transaction holds it there. Offsets are
asked of the admin side: one question for all partitions, with either isolation.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any

import tenacity
from confluent_kafka import IsolationLevel, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import (  # type: ignore[attr-defined] # not in its __all__
    AclOperation,
    AdminClient,
    OffsetSpec,
    TopicDescription,
)

from penstock import clients
from penstock.clients.kafka_errors import is_missing_right, is_transient, reason
from penstock.clients.reading import NotReadInTimeError, PartitionReader, reading_settings
from penstock.clients.requests.answers import CONNECT_TIMEOUT_S, first_answer, known_offset
from penstock.clients.requests.topic_ids import described, id_of
from penstock.clients.requests.topics import partition_counts
from penstock.clients.rights import MissingRightError, Operation, principal_of, topic_right
from penstock.errors import BrokerConnectionError, ConfigurationError, SourceError
from penstock.spark_sink.source.offsets import planning
from penstock.spark_sink.source.offsets.planning import Offsets
from penstock.spark_sink.source.options.options import SourceOptions

#: Seconds that records which only explain a wait may take to arrive, all together.
_RECORDS_TIMEOUT_S = 2.0
#: Seconds for one question of a running query: a broker that is gone does not answer, and the next question goes to
#: another one.
_QUESTION_TIMEOUT_S = 3.0
#: The name of a setting in the client library's complaints.
_NAMED = re.compile(r"\b(?:ssl|sasl|security|enable|fetch|socket|[a-z]+)(?:\.[a-z_]+)+\b")


@dataclass(frozen=True, slots=True)
class Topics:
    """What the brokers say of the topics that a query reads.

    Attributes:
        counts: the number of partitions of each that can be seen.
        ids: their ids, which a topic that is made anew does not keep; none from brokers that have none.
        refused: why others cannot be seen, or not read.
    """

    counts: Mapping[str, int]
    ids: Mapping[str, str]
    refused: Mapping[str, KafkaException]

    def is_unknown(self, topic: str) -> bool:
        """Tell whether the brokers say that there is no such topic, rather than that it may not or cannot be seen."""
        error = self.refused.get(topic)
        return error is not None and error.args[0].code() == KafkaError.UNKNOWN_TOPIC_OR_PART


class OffsetReader:
    """Answers the driver's questions about one query's topics and offsets. One thread uses it.

    A `kafka.` option that the client library refuses is a `ConfigurationError`.
    """

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        _refuse_wrong_settings(options)
        self._make_admin = partial(clients.admin, options.bootstrap_servers, options.client)
        self._admin: AdminClient = self._make_admin()

    def partitions(self) -> list[planning.TopicPartition]:
        """Return the partitions the query reads, as they are now.

        Raises `TopicNotFoundError` where a named topic or partition does not exist, `MissingRightError` where topics
        may not be read, and `SourceError` where one cannot be seen; `BrokerConnectionError` where no broker answered.
        """
        topics = self.topics()
        forbidden = [name for name, error in sorted(topics.refused.items()) if is_missing_right(error)]
        if forbidden:
            raise self._not_allowed(f"topic {', '.join(forbidden)} cannot be read", forbidden)
        for name, error in sorted(topics.refused.items()):
            if not topics.is_unknown(name):
                raise SourceError(
                    f"topic {name} cannot be seen at {self._options.bootstrap_servers}: {reason(error)}; see "
                    "to its brokers"
                )
        return self._options.selection.pick(topics.counts)

    def topics(self, expected: Collection[str] = ()) -> Topics:
        """Return which of the topics the query reads there are, and why others cannot be seen.

        What is said of topics that are expected is asked again, as often as the options say, for a broker may not know,
        or not answer, for a moment. Raises `BrokerConnectionError` where none answered.
        """
        asked = set(expected)

        def is_passing(state: tenacity.RetryCallState) -> bool:
            if (failure := state.outcome and state.outcome.exception()) is not None:
                return isinstance(failure, BrokerConnectionError) and bool(asked)
            if state.outcome is None:
                return False
            found: Topics = state.outcome.result()
            return any(is_transient(found.refused[name]) for name in found.refused.keys() & asked)

        return self._options.retrying(is_passing)(self._topics, asked)

    def _topics(self, expected: set[str]) -> Topics:
        servers, selection = self._options.bootstrap_servers, self._options.selection
        names = selection.names()
        if names is None:
            names = frozenset(filter(selection.covers, partition_counts(self._admin, servers)))
        asked = names | expected
        timeout_s = _QUESTION_TIMEOUT_S if expected else CONNECT_TIMEOUT_S

        def ask() -> tuple[dict[str, Any], dict[str, KafkaException]]:
            found, refused = described(self._admin, asked, timeout_s, with_operations=True)
            # Numbers below zero are the client's own errors: no broker has said anything.
            if refused and not found and all(error.args[0].code() < 0 for error in refused.values()):
                raise next(iter(refused.values()))
            return found, refused

        try:
            found, refused = first_answer(self._admin, servers, timeout_s, ask)
        except BrokerConnectionError:
            # The library goes on asking the node that it took for the controller, though that one is away (2.16, seen
            # for 87 s): another client asks who that is.
            self._admin = self._make_admin()
            raise
        for name in [name for name, one in found.items() if _may_only_be_seen(one)]:
            # Planned all the same, its tasks would fail one after the other.
            del found[name]
            refused[name] = KafkaException(KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED, "Read is not allowed"))
        return Topics(
            counts={name: len(one.partitions) for name, one in found.items()},
            ids={name: topic_id for name, one in found.items() if (topic_id := id_of(one)) is not None},
            refused=refused,
        )

    def earliest(self, partitions: Iterable[planning.TopicPartition]) -> Offsets:
        """Return the first offset each log still holds."""
        first: OffsetSpec = OffsetSpec.earliest()  # type: ignore[no-untyped-call] # untyped in the library
        return self._offsets(dict.fromkeys(partitions, first))

    def latest(self, partitions: Iterable[planning.TopicPartition]) -> Offsets:
        """Return the offset after the last one that may be read: the last stable one under read_committed."""
        last: OffsetSpec = OffsetSpec.latest()  # type: ignore[no-untyped-call] # untyped in the library
        return self._offsets(dict.fromkeys(partitions, last))

    def written(self, partitions: Iterable[planning.TopicPartition]) -> Offsets:
        """Return the offset after the last record written, whether it may be read or not."""
        last: OffsetSpec = OffsetSpec.latest()  # type: ignore[no-untyped-call] # untyped in the library
        return self._offsets(dict.fromkeys(partitions, last), IsolationLevel.READ_UNCOMMITTED)

    def at_times(self, times_ms: Mapping[planning.TopicPartition, int]) -> Offsets:
        """Return the first offset at or after a time of each partition, -1 where no message is as late."""
        return self._offsets({part: OffsetSpec.for_timestamp(time) for part, time in times_ms.items()})

    def timestamps_ms(self, offsets: Offsets) -> dict[planning.TopicPartition, int]:
        """Return the timestamps of the records at these offsets, committed or not, of those that come in time."""
        found: dict[planning.TopicPartition, int] = {}
        ends = {part: offset + 1 for part, offset in offsets.items()}
        client = self._options.client
        with (
            PartitionReader(
                self._options.bootstrap_servers, client, client["group.id"], isolation="read_uncommitted"
            ) as reader,
            suppress(NotReadInTimeError),
        ):
            for record in chain.from_iterable(reader.read(offsets, ends, limit_s=_RECORDS_TIMEOUT_S)):
                found[record.topic() or "", record.partition() or 0] = record.timestamp()[1]
        return found

    def _offsets(
        self, specs: Mapping[planning.TopicPartition, OffsetSpec], isolation: IsolationLevel | None = None
    ) -> Offsets:
        """Ask for offsets; what a broker did not answer is asked again, as often as the options say."""
        found: Offsets = {}

        def ask() -> tuple[planning.TopicPartition, KafkaException] | None:
            return self._ask({part: spec for part, spec in specs.items() if part not in found}, isolation, found)

        def is_passing(state: tenacity.RetryCallState) -> bool:
            refused = state.outcome.result() if state.outcome else None
            return refused is not None and not is_missing_right(refused[1]) and is_transient(refused[1])

        refused = self._options.retrying(is_passing)(ask) if specs else None
        if refused is not None:
            part, error = refused
            if is_missing_right(error):
                raise self._not_allowed(f"the offsets of {part[0]}[{part[1]}] cannot be read", [part[0]]) from error
            raise SourceError(
                f"the offsets of {part[0]}[{part[1]}] could not be read at {self._options.bootstrap_servers}: "
                f"{reason(error)}; check that its leader is up"
            ) from error
        return found

    def _not_allowed(self, what: str, topics: Iterable[str]) -> MissingRightError:
        # DESCRIBE is all that looking takes; who reads needs READ, which has it in it.
        rights = [topic_right(Operation.READ, topic) for topic in topics]
        return MissingRightError(what, rights, principal_of(self._options.client))

    def _ask(
        self, specs: Mapping[planning.TopicPartition, OffsetSpec], isolation: IsolationLevel | None, found: Offsets
    ) -> tuple[planning.TopicPartition, KafkaException] | None:
        """Put what is answered into `found`, and return one partition that was refused, with the reason."""
        mine = IsolationLevel.READ_COMMITTED if self._options.read_committed else IsolationLevel.READ_UNCOMMITTED
        futures = self._admin.list_offsets(
            {TopicPartition(topic, partition): spec for (topic, partition), spec in specs.items()},
            isolation_level=mine if isolation is None else isolation,
            request_timeout=_QUESTION_TIMEOUT_S,
        )
        refused = None
        for part, future in futures.items():
            try:
                found[(part.topic, part.partition)] = known_offset(future.result())
            except KafkaException as error:
                refused = (part.topic, part.partition), error
        return refused


def consumer_config(options: SourceOptions) -> dict[str, Any]:
    """Return the settings of a reading task's consumer: the user's, and those reading a range depends on."""
    # What the library fetches ahead is memory beside the Arrow batch: 16 MB a task. And it is fetched past the end of a
    # range, for nothing: with the library's 100,000 messages, ranges of 60,000 took half as much processor time again.
    # So many are read in some 20 ms, in which more comes.
    ahead: dict[str, Any] = {"queued.max.messages.kbytes": 16 * 1024, "queued.min.messages": 10_000}
    client = {**ahead, **options.client}
    # Offsets that are gone must be named, never jumped over.
    given: dict[str, Any] = {"auto.offset.reset": "error"}
    given |= {name: client[name] for name in ("fetch.wait.max.ms", "fetch.queue.backoff.ms") if name in client}
    # What is said of a group's member is judged by the library, too, and means nothing.
    return {**client, **reading_settings(client, client["group.id"], client["isolation.level"], given)}


def _may_only_be_seen(description: TopicDescription) -> bool:
    """Tell whether a topic may be described and not read. Brokers that do not tell rights list none at all."""
    allowed = description.authorized_operations or ()
    return AclOperation.DESCRIBE in allowed and AclOperation.READ not in allowed


def _refuse_wrong_settings(options: SourceOptions) -> None:
    """Let the library judge the settings on the driver, so that no task is started with wrong ones."""
    try:
        clients.consumer(options.bootstrap_servers, consumer_config(options)).close()
    except clients.ClientRefusedError as refused:
        complaint = str(refused)
        found = [name for name in options.client if f'"{name}"' in complaint] + _NAMED.findall(complaint)
        named = next((name for name in found if name in options.client), None)
        is_unknown = "No such configuration property" in complaint
        why = "it has no such setting" if is_unknown else "its value is not accepted, or a file it names cannot be read"
        what = f"the option kafka.{named}" if named else "an option kafka.*"
        raise ConfigurationError(
            f"the Kafka client refused {what}: {why} (names are librdkafka's, which differ from the Java client's "
            "in security settings)"
        ) from None
