"""The options of the Spark source, by the names of Spark's own Kafka source, checked once on the driver.

Spark hands option names over in lower case, so they are compared so; errors use the names as documented. Which
partitions are read is in `selection`, where a read begins and ends in `positions`.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import tenacity

from penstock.clients.reading import reading_settings
from penstock.errors import ConfigurationError
from penstock.options import nearest
from penstock.spark_sink.errors import DataLossError
from penstock.spark_sink.source.java_names import translated
from penstock.spark_sink.source.plan import LATEST
from penstock.spark_sink.source.positions import Position, Since, ending_position, starting_position
from penstock.spark_sink.source.selection import Selection, parse_selection

_KAFKA = "kafka."
#: The library wants the name of a group that is never joined.
GROUP = "penstock-spark"

#: `kafka.` keys the source holds itself, with what to do instead.
_OWNED = {
    "auto.offset.reset": "say where to begin with startingOffsets, and what a gap means with failOnDataLoss",
    "default.topic.config": "give its settings as options kafka.* of their own",
    "enable.auto.commit": "Spark keeps the offsets in its checkpoint and the sink in its ledger",
    "enable.auto.offset.store": "Spark keeps the offsets in its checkpoint",
    "enable.partition.eof": "the source finds the end of a range by it",
    "group.protocol": "the source assigns partitions itself and joins no group",
    "key.deserializer": "key is binary; cast it in the query",
    "value.deserializer": "value is binary; cast it in the query",
}

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
    starting: Position | None = None
    ending: Position | None = None
    max_offsets: int | None = None
    min_offsets: int | None = None
    max_trigger_delay_s: float = 900.0
    min_partitions: int | None = None
    max_records_per_partition: int | None = None
    fail_on_data_loss: bool = True
    include_headers: bool = False
    null_times: bool = False
    offset_retries: int = 30
    offset_retry_interval_s: float = 1.0
    poll_timeout_s: float = 120.0

    @property
    def read_committed(self) -> bool:
        """Whether only committed messages are read."""
        return self.client["isolation.level"] == "read_committed"

    @property
    def consumer_config(self) -> dict[str, Any]:
        """The settings of a reading task's consumer: the user's, and those reading a range depends on."""
        # What the library fetches ahead is memory beside the Arrow batch: 16 MB a task. And it is fetched past the end
        # of a range, for nothing: with the library's 100,000 messages, ranges of 60,000 took half as much processor
        # time again. So many are read in some 20 ms, in which more comes.
        ahead: dict[str, Any] = {"queued.max.messages.kbytes": 16 * 1024, "queued.min.messages": 10_000}
        client = {**ahead, **self.client}
        # Offsets that are gone must be named, never jumped over.
        given: dict[str, Any] = {"auto.offset.reset": "error"}
        given |= {name: client[name] for name in ("fetch.wait.max.ms", "fetch.queue.backoff.ms") if name in client}
        # The library checks the settings of a group's member, too, which mean nothing here.
        return {**client, **reading_settings(client, client["group.id"], client["isolation.level"], given)}

    @classmethod
    def parse(cls, options: Mapping[str, str]) -> SourceOptions:
        """Check the options of a query; a `ConfigurationError` names one that is unknown, wrong or missing."""
        given = {name.lower(): value for name, value in options.items()}
        _refuse_unknown(given)
        client = _client_settings(given)
        servers = client.pop("bootstrap.servers", "").strip()
        if not servers:
            raise ConfigurationError("the option kafka.bootstrap.servers is missing; give the addresses of the brokers")
        plain = {
            attribute: read(option, given[option.lower()])
            for option, (attribute, read) in _PLAIN.items()
            if option.lower() in given
        }
        made = cls(servers, client, parse_selection(given), starting_position(given), ending_position(given), **plain)
        if made.min_offsets is not None and made.min_offsets > (made.max_offsets or made.min_offsets):
            raise ConfigurationError(
                f"the option minOffsetsPerTrigger is {made.min_offsets}, which is more than maxOffsetsPerTrigger "
                f"({made.max_offsets}); lower one or raise the other"
            )
        return made

    def retrying(self, retry: tenacity.retry_base) -> tenacity.Retrying:
        """Return the policy of questions for offsets: what may pass is asked again, and the last answer counts."""
        return tenacity.Retrying(
            stop=tenacity.stop_after_attempt(self.offset_retries + 1),
            wait=tenacity.wait_fixed(self.offset_retry_interval_s),
            retry=retry,
            retry_error_callback=lambda state: state.outcome.result() if state.outcome else None,
        )

    def report_loss(self, what: str, remedy: str = "check the topic and its retention") -> None:
        """Raise `DataLossError` for messages that are gone, or log them where the options allow to go on without."""
        if self.fail_on_data_loss:
            raise DataLossError(f"{what}; {remedy}, or set failOnDataLoss to false to go on regardless")
        _log.warning("%s; going on, as failOnDataLoss=false says", what)

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
        if name in _OWNED:
            raise ConfigurationError(f"the option kafka.{name} cannot be set: {_OWNED[name]}")
        if name == "logger" or (name.endswith("_cb") and name != "oauth_cb"):
            raise ConfigurationError(
                f"the option kafka.{name} cannot be set: the client takes a function of Python for it, and an option "
                "is text; leave it out"
            )
    # The library wants a group's name though partitions are assigned by hand and no group is ever joined.
    prefix = given.get("groupidprefix")
    group = GROUP if prefix is None else f"{prefix}-{GROUP}"
    client = {"isolation.level": "read_committed", "group.id": group, **translated(client)}
    if client["isolation.level"] not in ("read_committed", "read_uncommitted"):
        raise ConfigurationError(
            "the option kafka.isolation.level must be read_committed or read_uncommitted, "
            f"but is {client['isolation.level']!r}"
        )
    # An empty one ends the process (confluent-kafka 2.16).
    for option, text in (("groupIdPrefix", prefix), ("kafka.group.id", client["group.id"])):
        if text is not None and not text.strip():
            raise ConfigurationError(f"the option {option} is empty; name the group, or leave the option out")
    return client


def _whole(option: str, text: str, least: int = 1) -> int:
    stripped = text.strip()
    if not (stripped.isascii() and stripped.isdecimal()) or int(stripped) < least:
        raise ConfigurationError(f"the option {option} must be a whole number of at least {least}, but is {text!r}")
    return int(stripped)


def _duration_s(option: str, text: str) -> float:
    found = _DURATION.fullmatch(text.strip().lower())
    if found is None or (found[2] or "ms") not in _UNITS_S:
        raise ConfigurationError(
            f"the option {option} must be a time such as 30s, 5m or 1h, but is {text!r}; "
            f"units are {', '.join(_UNITS_S)}, and none means ms"
        )
    return int(found[1]) * _UNITS_S[found[2] or "ms"]


def _is_second(option: str, text: str, words: tuple[str, str] = ("false", "true")) -> bool:
    """Tell whether an option has the second of its two words."""
    if text.strip().lower() not in words:
        raise ConfigurationError(f"the option {option} must be {words[1]} or {words[0]}, but is {text!r}")
    return text.strip().lower() == words[1]


#: Options that stand for themselves, each with its attribute and what reads it.
_PLAIN: Mapping[str, tuple[str, Callable[[str, str], Any]]] = {
    "maxOffsetsPerTrigger": ("max_offsets", _whole),
    "minOffsetsPerTrigger": ("min_offsets", _whole),
    "maxTriggerDelay": ("max_trigger_delay_s", _duration_s),
    "minPartitions": ("min_partitions", _whole),
    "maxRecordsPerPartition": ("max_records_per_partition", _whole),
    "failOnDataLoss": ("fail_on_data_loss", _is_second),
    "includeHeaders": ("include_headers", _is_second),
    "timestampOutOfRange": ("null_times", partial(_is_second, words=("error", "null"))),
    "fetchOffset.numRetries": ("offset_retries", partial(_whole, least=0)),
    "fetchOffset.retryIntervalMs": ("offset_retry_interval_s", lambda option, text: _whole(option, text, 0) / 1_000),
    "kafkaConsumer.pollTimeoutMs": ("poll_timeout_s", lambda option, text: _whole(option, text) / 1_000),
}

#: All options, by the names as documented, beside `kafka.*`.
_NAMES = (
    *("subscribe", "subscribePattern", "assign", "startingOffsets", "startingTimestamp", "startingOffsetsByTimestamp"),
    *("startingOffsetsByTimestampStrategy", "endingOffsets", "endingTimestamp", "endingOffsetsByTimestamp"),
    *_PLAIN,
    "groupIdPrefix",
)


def _refuse_unknown(given: Mapping[str, str]) -> None:
    known = {name.lower(): name for name in _NAMES}
    for name in given:
        if name in known or name.startswith(_KAFKA):
            continue
        near = nearest(name, [*known, "kafka.bootstrap.servers"], 0.6)
        hint = f"did you mean {known.get(near, near)}?" if near else f"it knows {', '.join(_NAMES)}"
        raise ConfigurationError(
            f"the source penstock has no option {name!r}; {hint} (client settings begin with kafka.)"
        )
