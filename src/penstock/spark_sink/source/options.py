"""The options of the Spark source, with the names of Spark's own Kafka source, checked once on the driver.

Spark passes option names in lower case, so they are compared in lower case; errors use the documented names.
`positions` has the options for begin and end.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, field, fields
from functools import partial
from typing import Any

import tenacity

from penstock.clients.reading import reading_settings
from penstock.errors import ConfigurationError
from penstock.options import nearest
from penstock.spark_sink.errors import DataLossError
from penstock.spark_sink.source.positions import Position, position

_KAFKA = "kafka."
#: The library requires the name of a group, although none is joined.
GROUP = "penstock-spark"

#: `kafka.` keys that the source sets itself, with what to do instead.
_OWNED = {
    "auto.offset.reset": "say where to begin with startingOffsets, and what a gap means with failOnDataLoss",
    "default.topic.config": "give its settings as options kafka.* of their own",
    "enable.auto.commit": "Spark keeps the offsets in its checkpoint and the sink in its ledger",
    "enable.auto.offset.store": "Spark keeps the offsets in its checkpoint",
    "enable.partition.eof": "the source finds the end of a range by it",
    "group.protocol": "the source assigns partitions itself and joins no group",
    "key.deserializer": "key is binary; cast it in the query",
    "logger": "the client takes an object of Python for it, and an option is text; leave it out",
    "value.deserializer": "value is binary; cast it in the query",
}

#: Options of earlier versions, with what to do instead.
_REMOVED = {
    "assign": "name the topic with subscribe, and filter the frame by its column partition",
    "endingOffsetsByTimestamp": "give endingTimestamp, or an offset for each partition with endingOffsets",
    "groupIdPrefix": "give kafka.group.id",
    "maxRecordsPerPartition": "give minPartitions",
    "maxTriggerDelay": "give the query a trigger with a longer interval",
    "minOffsetsPerTrigger": "give the query a trigger with a longer interval",
    "startingOffsetsByTimestamp": "give startingTimestamp, or an offset for each partition with startingOffsets",
    "startingOffsetsByTimestampStrategy": "leave it out: where no message is as late, the next one is read first",
    "subscribePattern": "name the topics with subscribe, with commas between them",
}

_log = logging.getLogger("penstock.spark_sink")


def _whole(option: str, text: str, least: int = 1) -> int:
    stripped = text.strip()
    if not (stripped.isascii() and stripped.isdecimal()) or int(stripped) < least:
        raise ConfigurationError(f"the option {option} must be a whole number of at least {least}, but is {text!r}")
    return int(stripped)


def _is_second(option: str, text: str, words: tuple[str, str] = ("false", "true")) -> bool:
    """Tell whether an option has the second of its two possible words."""
    if text.strip().lower() not in words:
        raise ConfigurationError(f"the option {option} must be {words[1]} or {words[0]}, but is {text!r}")
    return text.strip().lower() == words[1]


def _milliseconds(option: str, text: str, least: int = 1) -> float:
    return _whole(option, text, least) / 1_000


def _option(name: str, read: Callable[[str, str], Any], *, default: Any) -> Any:
    """Return the dataclass field of an option; `read` converts name and text to its value."""
    return field(default=default, metadata={"option": name, "read": read})


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """The options of one query, checked."""

    bootstrap_servers: str
    #: Client settings by librdkafka's names. They may contain secrets, so they are never shown.
    client: Mapping[str, str] = field(repr=False)
    topics: tuple[str, ...]
    #: Begin of a read, and end of a batch read; None: the default.
    starting: Position | None = None
    ending: Position | None = None
    #: Most offsets of one micro-batch over all partitions, or None.
    max_offsets: int | None = _option("maxOffsetsPerTrigger", _whole, default=None)
    #: Least number of tasks; None: one for each Kafka partition, shared by small ones.
    min_partitions: int | None = _option("minPartitions", _whole, default=None)
    fail_on_data_loss: bool = _option("failOnDataLoss", _is_second, default=True)
    include_headers: bool = _option("includeHeaders", _is_second, default=False)
    #: Whether a timestamp that Spark cannot hold becomes NULL; otherwise it fails the task.
    null_times: bool = _option("timestampOutOfRange", partial(_is_second, words=("error", "null")), default=False)
    #: How often the driver repeats a question for offsets that a broker did not answer, and the seconds between.
    offset_retries: int = _option("fetchOffset.numRetries", partial(_whole, least=0), default=30)
    offset_retry_interval_s: float = _option(
        "fetchOffset.retryIntervalMs", partial(_milliseconds, least=0), default=1.0
    )
    #: Seconds without any progress after which a task fails.
    poll_timeout_s: float = _option("kafkaConsumer.pollTimeoutMs", _milliseconds, default=120.0)

    @property
    def read_committed(self) -> bool:
        """Whether only committed messages are read."""
        return self.client["isolation.level"] == "read_committed"

    @property
    def consumer_config(self) -> dict[str, Any]:
        """The settings of a task's consumer: the user's, and those that reading a range depends on."""
        # Messages fetched ahead take memory besides the Arrow batch: 16 MB a task. They are also fetched past the end
        # of a range, for nothing: with the library's 100,000 messages, ranges of 60,000 took 50 % more processor time.
        # 10,000 messages are read in about 20 ms, and more arrive meanwhile.
        ahead: dict[str, Any] = {"queued.max.messages.kbytes": 16 * 1024, "queued.min.messages": 10_000}
        client = {**ahead, **self.client}
        # Missing offsets must be reported, never skipped.
        given: dict[str, Any] = {"auto.offset.reset": "error"}
        given |= {name: client[name] for name in ("fetch.wait.max.ms", "fetch.queue.backoff.ms") if name in client}
        # Without the settings of a group member: the library checks them although they mean nothing here.
        return {**client, **reading_settings(client, client["group.id"], client["isolation.level"], given)}

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> SourceOptions:
        """Check the options of a query; `ConfigurationError` names an unknown, wrong or missing one."""
        given = {name.lower(): value for name, value in options.items()}
        _refuse_unknown(given)
        client = _client_settings(given)
        servers = client.pop("bootstrap.servers", "").strip()
        if not servers:
            raise ConfigurationError("the option kafka.bootstrap.servers is missing; give the addresses of the brokers")
        plain = {
            attribute.name: attribute.metadata["read"](option, given[option.lower()])
            for option, attribute in _plain().items()
            if option.lower() in given
        }
        return cls(servers, client, _topics(given), position("starting", given), position("ending", given), **plain)

    def retrying(self, retry: tenacity.retry_base) -> tenacity.Retrying:
        """Return the retry policy of questions for offsets: transient errors are retried, the last result counts."""
        return tenacity.Retrying(
            stop=tenacity.stop_after_attempt(self.offset_retries + 1),
            wait=tenacity.wait_fixed(self.offset_retry_interval_s),
            retry=retry,
            retry_error_callback=lambda state: state.outcome.result() if state.outcome else None,
        )

    def report_loss(self, what: str, remedy: str = "check the topic and its retention") -> None:
        """Raise `DataLossError` for lost messages, or log them if `failOnDataLoss` is false."""
        if self.fail_on_data_loss:
            raise DataLossError(f"{what}; {remedy}, or set failOnDataLoss to false to go on regardless")
        _log.warning("%s; going on, as failOnDataLoss=false says", what)

    def for_stream(self) -> SourceOptions:
        """Return these options, or raise `ConfigurationError` if one has no meaning in a stream."""
        if self.ending is not None:
            raise ConfigurationError(f"the option {self.ending.option} has no meaning in a stream; leave it out")
        return self


def _topics(given: Mapping[str, str]) -> tuple[str, ...]:
    topics = [name.strip() for name in given.get("subscribe", "").split(",") if name.strip()]
    if not topics:
        raise ConfigurationError("the option subscribe names no topic; give one or several, with commas")
    return tuple(dict.fromkeys(topics))


def _client_settings(given: Mapping[str, str]) -> dict[str, str]:
    """Return the client settings by librdkafka's names, with this source's defaults."""
    client = {name[len(_KAFKA) :]: value for name, value in given.items() if name.startswith(_KAFKA)}
    for name in client:
        if name in _OWNED:
            raise ConfigurationError(f"the option kafka.{name} cannot be set: {_OWNED[name]}")
    # The library requires a group's name although partitions are assigned by hand and no group is joined.
    client = {"isolation.level": "read_committed", "group.id": GROUP, **client}
    if not client["group.id"].strip():  # an empty one ends the process (confluent-kafka 2.16)
        raise ConfigurationError("the option kafka.group.id is empty; name the group, or leave the option out")
    return client


#: Documented names of the options without fields of their own, except `kafka.*`.
_NAMES = ("subscribe", "startingOffsets", "startingTimestamp", "endingOffsets", "endingTimestamp")


def _plain() -> dict[str, Field[Any]]:
    return {made.metadata["option"]: made for made in fields(SourceOptions) if made.metadata}


def _refuse_unknown(given: Mapping[str, str]) -> None:
    names = (*_NAMES, *_plain())
    known = {name.lower(): name for name in names}
    for removed, remedy in _REMOVED.items():
        if removed.lower() in given:
            raise ConfigurationError(f"the source penstock has no option {removed} any more: {remedy}")
    for name in given:
        if name not in known and not name.startswith(_KAFKA):
            near = nearest(name, [*known, "kafka.bootstrap.servers"], 0.6)
            hint = f"did you mean {known.get(near, near)}?" if near else f"it knows {', '.join(names)}"
            raise ConfigurationError(
                f"the source penstock has no option {name!r}; {hint} (client settings begin with kafka.)"
            )
