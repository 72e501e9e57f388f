"""Where a query begins that has no checkpoint: where its sink's ledger says; a sink without one needs a checkpoint.

With a checkpoint that knows the query, Spark goes on by that and asks nobody else. So the ledger is looked up at every
start, and counts where the checkpoint is new or lost.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from penstock import clients
from penstock.clients.requests.topics import require_topics
from penstock.clients.rights import principal_of
from penstock.errors import ConfigurationError, MessageFormatError
from penstock.options import ClientConfig
from penstock.spark_sink.queries.sink_specs import SinkSpec
from penstock.spark_sink.sinks.sink import has_ledger, ledger_positions
from penstock.spark_sink.source.offsets.planning import (
    EARLIEST,
    LATEST,
    Offsets,
    TopicPartition,
    parse_offsets,
    to_json,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_log = logging.getLogger("penstock.spark_sink")

#: Where Spark keeps checkpoints of queries that name none, by the query's name.
CHECKPOINTS = "spark.sql.streaming.checkpointLocation"

_STARTING = "startingoffsets"
#: Options of the source that say where a query begins, in lower case.
_WHERE = (_STARTING, "startingtimestamp", "startingoffsetsbytimestamp", "startingoffsetsbytimestampstrategy")


def is_remembered(spark: SparkSession, checkpoint_location: str | None) -> bool:
    """Tell whether Spark keeps a query's progress over restarts."""
    return checkpoint_location is not None or bool(spark.conf.get(CHECKPOINTS, None))


def refuse_forgetful(name: str, function: object) -> None:
    """Raise `ConfigurationError` for a sink without a ledger in a query without a checkpoint: nobody remembers."""
    if not has_ledger(function):
        raise ConfigurationError(
            f"the sink of the query {name} has no ledger, and the query no checkpoint: every start would handle all of "
            "the topic again; give it checkpoint_location=..., or a sink that remembers what it stored, such as SqlSink"
        )


def starting_options(spec: SinkSpec, bootstrap_servers: str, config: ClientConfig) -> dict[str, str]:
    """Return the options of the source, with the ledger's positions in place of what they say of the beginning.

    Where the sink's options say where to begin, they count before its `starting_offsets`. Raises `SinkError` where the
    ledger cannot be read, and `BrokerConnectionError`, `MissingRightError` or `TopicNotFoundError`.
    """
    given = {_STARTING: spec.starting_offsets} | {option.lower(): value for option, value in spec.options.items()}
    if not has_ledger(spec.function):
        return given
    admin = clients.admin(bootstrap_servers, config)
    counts = require_topics(admin, bootstrap_servers, spec.topics, principal=principal_of(config))
    partitions = [(topic, number) for topic in spec.topics for number in range(counts[topic])]
    ledger = ledger_positions(spec.function, spec.name, partitions) or {}
    known = {part: ledger[part] for part in partitions if part in ledger}
    if not known:
        return given
    _log.info("the query %s begins where its sink's ledger says, unless it has a checkpoint", spec.name)
    rest = {option: value for option, value in given.items() if option not in _WHERE}
    return rest | {_STARTING: begin_at(given[_STARTING], partitions, known)}


def begin_at(otherwise: str, partitions: Iterable[TopicPartition], ledger: Offsets) -> str:
    """Return Spark's JSON of where to begin in each partition.

    A partition that the ledger does not know is read from its beginning where it knows the topic: it is new, or nothing
    was stored of it yet. A topic that it does not know begins as `otherwise` says: `earliest`, `latest` or Spark's
    JSON.
    """
    given = _given_positions(otherwise)
    topics = {topic for topic, _ in ledger}
    offsets: Offsets = {}
    for part in partitions:
        new = EARLIEST if part[0] in topics else given(part)
        # One that neither of them knows is left out, and the source names it.
        if (offset := ledger.get(part, new)) is not None:
            offsets[part] = offset
    return json.dumps(to_json(offsets))


def _given_positions(otherwise: str) -> Callable[[TopicPartition], int | None]:
    word = otherwise.strip().lower()
    if word in ("earliest", "latest"):
        return lambda _: EARLIEST if word == "earliest" else LATEST
    try:
        return parse_offsets(otherwise).get
    except MessageFormatError as error:
        raise ConfigurationError(f"starting_offsets must be earliest, latest or JSON: {error}") from error
