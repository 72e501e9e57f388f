"""The options of the Spark source, by the names of Spark's own Kafka source, checked once on the driver.

Spark hands option names over in lower case, so they are compared so; errors use the names as documented. Which
partitions are read is `selection`'s, where a read begins and ends `positions`'.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import tenacity

from penstock.errors import ConfigurationError
from penstock.options import nearest
from penstock.spark_sink.source.offsets.planning import LATEST
from penstock.spark_sink.source.offsets.positions import Position, Since, ending_position, starting_position
from penstock.spark_sink.source.offsets.selection import Selection, parse_selection
from penstock.spark_sink.source.options.java_names import translated

#: The options of the source, as documented, beside `kafka.*`.
OPTION_NAMES = (
    "subscribe",
    "subscribePattern",
    "assign",
    "startingOffsets",
    "startingTimestamp",
    "startingOffsetsByTimestamp",
    "startingOffsetsByTimestampStrategy",
    "endingOffsets",
    "endingTimestamp",
    "endingOffsetsByTimestamp",
    "maxOffsetsPerTrigger",
    "minOffsetsPerTrigger",
    "maxTriggerDelay",
    "minPartitions",
    "maxRecordsPerPartition",
    "failOnDataLoss",
    "includeHeaders",
    "timestampOutOfRange",
    "groupIdPrefix",
    "fetchOffset.numRetries",
    "fetchOffset.retryIntervalMs",
    "kafkaConsumer.pollTimeoutMs",
)

_KAFKA = "kafka."
#: The library wants the name of a group that is never joined.
GROUP = "penstock-spark"

#: `kafka.` keys the source holds itself, with what to do in place of them.
OWNED = {
    "auto.offset.reset": "say where to begin with startingOffsets, and what a gap means with failOnDataLoss",
    "default.topic.config": "give its settings as options kafka.* of their own",
    "enable.auto.commit": "Spark keeps the offsets in its checkpoint and the sink in its ledger",
    "enable.auto.offset.store": "Spark keeps the offsets in its checkpoint",
    "enable.partition.eof": "the source finds the end of a range by it",
    "group.protocol": "the source assigns partitions itself and joins no group",
    "key.deserializer": "key is binary; cast it in the query",
    "value.deserializer": "value is binary; cast it in the query",
    "key.serializer": "this is a source; it writes nothing",
    "value.serializer": "this is a source; it writes nothing",
    "interceptor.classes": "the client library has no interceptors",
}

#: What the client library takes a function or an object for, beside names that end with `_cb`.
_NO_TEXT = ("logger", "on_commit", "on_delivery")

#: Spark's units of time; a number without one counts milliseconds.
_UNITS_S = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3_600.0, "d": 86_400.0}
_DURATION = re.compile(r"([0-9]+) *([a-z]+)?")

_log = logging.getLogger("penstock.spark_sink")


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """The options of one query, checked.

    Attributes:
        client: client settings by librdkafka's names; they may hold secrets, so they are never shown.
        starting: where a read begins: `earliest`, `latest`, offsets, a time, or None for the default.
        ending: where a batch read ends: `latest`, offsets, a time, or None for the default.
        max_offsets: most offsets one micro-batch takes, over all partitions, or None.
        min_offsets: least offsets that are worth a micro-batch, over all partitions, or None.
        max_trigger_delay_s: seconds after which a micro-batch begins with fewer than `min_offsets`.
        min_partitions: least number of tasks, or None for one per Kafka partition, where small ones share some.
        max_records_per_partition: most offsets one task reads, or None.
        null_times: whether a timestamp that Spark cannot hold is NULL; otherwise it ends the task.
        offset_retries: how often the driver asks for offsets again where a broker did not answer.
        offset_retry_interval_s: seconds between two such questions.
        poll_timeout_s: seconds a task waits without any progress before it gives up.
    """

    bootstrap_servers: str
    client: Mapping[str, str] = field(repr=False)
    selection: Selection
    starting: Position | None
    ending: Position | None
    max_offsets: int | None
    min_offsets: int | None
    max_trigger_delay_s: float
    min_partitions: int | None
    max_records_per_partition: int | None
    fail_on_data_loss: bool
    include_headers: bool
    null_times: bool
    offset_retries: int
    offset_retry_interval_s: float
    poll_timeout_s: float

    @property
    def read_committed(self) -> bool:
        """Whether only committed messages are read."""
        return self.client["isolation.level"] == "read_committed"

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> SourceOptions:
        """Check the options of a query; a `ConfigurationError` names one that is unknown, wrong or missing."""
        given = {name.lower(): value for name, value in options.items()}
        _refuse_unknown(given)
        client = _client_settings(given)
        servers = client.pop("bootstrap.servers", "").strip()
        if not servers:
            raise ConfigurationError("the option kafka.bootstrap.servers is missing; give the addresses of the brokers")
        max_offsets, min_offsets = _count("maxOffsetsPerTrigger", given), _count("minOffsetsPerTrigger", given)
        if max_offsets is not None and min_offsets is not None and min_offsets > max_offsets:
            raise ConfigurationError(
                f"the option minOffsetsPerTrigger is {min_offsets}, which is more than maxOffsetsPerTrigger "
                f"({max_offsets}); lower one or raise the other"
            )
        return cls(
            bootstrap_servers=servers,
            client=client,
            selection=parse_selection(given),
            starting=starting_position(given),
            ending=ending_position(given),
            max_offsets=max_offsets,
            min_offsets=min_offsets,
            max_trigger_delay_s=_duration_s("maxTriggerDelay", given, "15m"),
            min_partitions=_count("minPartitions", given),
            max_records_per_partition=_count("maxRecordsPerPartition", given),
            fail_on_data_loss=_flag("failOnDataLoss", given, default=True),
            include_headers=_flag("includeHeaders", given, default=False),
            null_times=_flag("timestampOutOfRange", given, default=False, words=("error", "null")),
            offset_retries=_number("fetchOffset.numRetries", given, least=0, default=30),
            offset_retry_interval_s=_number("fetchOffset.retryIntervalMs", given, least=0, default=1_000) / 1000,
            poll_timeout_s=_number("kafkaConsumer.pollTimeoutMs", given, least=1, default=120_000) / 1000,
        )

    def retrying(self, retry: Callable[[tenacity.RetryCallState], bool]) -> tenacity.Retrying:
        """Return the policy of questions for offsets: what is passing is asked again, and the last answer counts."""
        return tenacity.Retrying(
            stop=tenacity.stop_after_attempt(self.offset_retries + 1),
            wait=tenacity.wait_fixed(self.offset_retry_interval_s),
            retry=retry,
            retry_error_callback=lambda state: state.outcome.result() if state.outcome else None,
        )

    def for_stream(self) -> SourceOptions:
        """Return these options, or raise `ConfigurationError` where one has no meaning in a stream."""
        if self.ending is not None:
            said = self.ending.option if isinstance(self.ending, Since) else "endingOffsets"
            raise ConfigurationError(f"the option {said} has no meaning in a stream; leave it out")
        return self

    def for_batch(self) -> SourceOptions:
        """Return these options, or raise `ConfigurationError` where one has no meaning in a batch."""
        if self.starting == "latest" or (isinstance(self.starting, dict) and LATEST in self.starting.values()):
            raise ConfigurationError(
                "the option startingOffsets must not be latest in a batch query, which would read nothing; "
                "give earliest or offsets"
            )
        if self.ending == "earliest" or (isinstance(self.ending, dict) and min(self.ending.values()) < LATEST):
            raise ConfigurationError(
                "the option endingOffsets must not be earliest, which would read nothing; give latest or offsets"
            )
        return self


def _client_settings(given: Mapping[str, str]) -> dict[str, str]:
    """Return what is given for the client, by librdkafka's names, with this source's defaults."""
    client = {name[len(_KAFKA) :]: value for name, value in given.items() if name.startswith(_KAFKA)}
    for name in client:
        if name in OWNED:
            raise ConfigurationError(f"the option kafka.{name} cannot be set: {OWNED[name]}")
        if name != "oauth_cb" and (name in _NO_TEXT or name.endswith("_cb")):
            raise ConfigurationError(
                f"the option kafka.{name} cannot be set: the client takes a function of Python for it, and an option "
                "is text; leave it out"
            )
    translation = translated(client)
    if translation.left_out:
        _log.debug("left out, as they mean nothing to this client: kafka.%s", ", kafka.".join(translation.left_out))
    client = translation.client
    client.setdefault("isolation.level", "read_committed")
    if client["isolation.level"] not in ("read_committed", "read_uncommitted"):
        raise ConfigurationError(
            "the option kafka.isolation.level must be read_committed or read_uncommitted, "
            f"but is {client['isolation.level']!r}"
        )
    prefix = given.get("groupidprefix")
    if prefix is not None and not prefix.strip():
        raise ConfigurationError("the option groupIdPrefix is empty; name the group, or leave the option out")
    # The library wants a group's name though partitions are assigned by hand and no group is ever joined. An empty
    # one ends the process (confluent-kafka 2.16).
    client.setdefault("group.id", GROUP if prefix is None else f"{prefix}-{GROUP}")
    if not client["group.id"].strip():
        raise ConfigurationError("the option kafka.group.id is empty; name the group, or leave the option out")
    return client


def _refuse_unknown(given: Mapping[str, str]) -> None:
    known = {name.lower(): name for name in OPTION_NAMES}
    for name in given:
        if name in known or name.startswith(_KAFKA):
            continue
        near = nearest(name, [*known, "kafka.bootstrap.servers"], 0.6)
        hint = f"did you mean {known.get(near, near)}?" if near else f"it knows {', '.join(OPTION_NAMES)}"
        raise ConfigurationError(
            f"the source penstock has no option {name!r}; {hint} (client settings begin with kafka.)"
        )


def _count(option: str, given: Mapping[str, str]) -> int | None:
    return _number(option, given, least=1, default=0) or None


def _number(option: str, given: Mapping[str, str], *, least: int, default: int) -> int:
    text = given.get(option.lower())
    if text is None:
        return default
    stripped = text.strip()
    if not (stripped.isascii() and stripped.isdecimal()) or int(stripped) < least:
        raise ConfigurationError(f"the option {option} must be a whole number of at least {least}, but is {text!r}")
    return int(stripped)


def _duration_s(option: str, given: Mapping[str, str], default: str) -> float:
    text = given.get(option.lower(), default)
    found = _DURATION.fullmatch(text.strip().lower())
    if found is None or (found[2] or "ms") not in _UNITS_S:
        raise ConfigurationError(
            f"the option {option} must be a time such as 30s, 5m or 1h, but is {text!r}; "
            f"units are {', '.join(_UNITS_S)}, and none means ms"
        )
    return int(found[1]) * _UNITS_S[found[2] or "ms"]


def _flag(option: str, given: Mapping[str, str], *, default: bool, words: tuple[str, str] = ("false", "true")) -> bool:
    """Tell whether an option has the second of its two words."""
    text = given.get(option.lower(), words[default])
    if text.strip().lower() not in words:
        raise ConfigurationError(f"the option {option} must be {words[1]} or {words[0]}, but is {text!r}")
    return text.strip().lower() == words[1]
