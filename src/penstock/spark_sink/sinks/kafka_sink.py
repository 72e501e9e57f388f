"""`KafkaSink`: a foreachBatch function that publishes rows to Kafka, each once whatever is repeated.

Executors publish, one source partition at a time; a Kafka transaction holds rows and ledger together (`kafka_ledger`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from pyspark.sql import DataFrame
from pyspark.sql import functions as F  # noqa: N812 - the name under which everybody knows it
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import BinaryType, StringType, StructType

from penstock.clients.rights import Right
from penstock.errors import ConfigurationError
from penstock.options import ClientConfig, not_empty, positive_int
from penstock.spark_sink.errors import SchemaMismatchError
from penstock.spark_sink.sinks.kafka_ledger import (
    LEDGER_TOPIC,
    Target,
    require_settings,
    require_target,
)
from penstock.spark_sink.sinks.kafka_publication import PUBLISHED, PublishingSink
from penstock.spark_sink.sinks.position import require_columns

#: Column that names the topic of a row, where the sink names none.
TARGET_TOPIC = "target_topic"

_HEADERS = "array<struct<key:string,value:binary>>"


@dataclass(frozen=True, slots=True)
class KafkaSink(PublishingSink):
    """Publishes the rows of micro-batches to Kafka, each once for readers of committed messages.

    Use it with `writeStream.foreachBatch(sink)`, once for each batch and name: a second call in the same batch is
    an error. The frame carries `topic`, `partition` and `offset` of the source,
    `value` and, if wanted, `key` (text or bytes) and `headers` (as the source gives them). Messages of one source
    partition are published in the order of their offsets; several rows of one message in any order.

    Rows and the ledger are written in one Kafka transaction for each source partition, or several where a batch holds
    more than 10,000 rows or 8 MB of one: readers see a batch in parts, each whole. With `atomic_batches` a batch is one
    transaction: readers see all of it or nothing.

    Only one query has a name. A second copy of it, started by mistake, shuts out the first and is shut out by it; what
    both publish is published once, and after some tries one of them may fail. A sink can be pickled.

    Attributes:
        bootstrap_servers: addresses of the brokers to publish to.
        topic: the topic of all rows; without one the column `target_topic` names it. It must exist.
        name: of the query, in the transactional ids `<name>/<0 to 63>` and in the ledger. It is the memory of what was
            published: under another name all of it is published again.
        config: client settings by librdkafka's names; may hold secrets and is never shown.
        parallelism: number of tasks that publish; 64 at most have something to do.
        atomic_batches: whether a batch is one transaction. Its rows go through one task, which has to hold them,
            within 30 seconds. Change it only when the query has stopped for good.
        ledger_topic: topic of the ledger, made if it does not exist; many sinks may share it.
    """

    bootstrap_servers: str
    topic: str | None = None
    name: str = field(kw_only=True)
    config: ClientConfig = field(default_factory=dict, kw_only=True, repr=False)
    parallelism: int = field(default=4, kw_only=True)
    atomic_batches: bool = field(default=False, kw_only=True)
    ledger_topic: str = field(default=LEDGER_TOPIC, kw_only=True)

    def __post_init__(self) -> None:
        """Check the settings; a `ConfigurationError` names a wrong one."""
        require_settings("KafkaSink", self.bootstrap_servers, self.name, self.ledger_topic, self.config)
        if self.topic is not None:
            not_empty("topic", self.topic)
        if self.topic == self.ledger_topic:
            raise ConfigurationError("topic and ledger_topic must differ; rename one")
        positive_int("parallelism", self.parallelism)
        object.__setattr__(self, "config", dict(self.config))

    def check(self, schema: StructType) -> None:
        """Say what is wrong with a frame of this schema, or with the topics; make the ledger's.

        Raises:
            SinkError: a column is missing or has another type than a message's.
            MissingRightError: the client may not publish to the topic, or not keep the ledger.
            TopicNotFoundError: the topic does not exist.
            BrokerConnectionError: no broker answered.
            ConfigurationError: the ledger's topic cannot be used, or the client library refuses the settings.
        """
        self._check_columns(schema)
        require_target(self._target(), [] if self.topic is None else [self.topic])

    def __call__(self, batch: DataFrame, batch_id: int) -> None:
        """Publish one micro-batch.

        Raises:
            SinkError: some rows could not be published; others may be, and are left out when the batch comes again.
            MissingRightError: the same, for want of a right.
            TopicNotFoundError: the topic does not exist.
            BrokerConnectionError: no broker answered.
        """
        self._publish(batch, batch_id, self._as_messages)

    def least_rights(self, _topics: Iterable[str]) -> list[Right]:
        """Return the rights that its client needs, save those on topics that the rows name."""
        return self._target().least_rights([] if self.topic is None else [self.topic])

    def _target(self) -> Target:
        where = self.bootstrap_servers, self.config, self.name, self.ledger_topic
        return Target(*where, whole=self.atomic_batches)

    def _as_messages(self, batch: DataFrame) -> DataFrame:
        """Return the frame with the columns of `PUBLISHED`, whatever it had."""
        given = {name: F.col(name) for name in batch.columns if name in PUBLISHED.names}
        given |= {"place": F.lit(0), "target_partition": F.lit(-1)}
        if self.topic is not None:
            given[TARGET_TOPIC] = F.lit(self.topic)
        kinds = from_arrow_schema(PUBLISHED)
        return batch.select(
            *(given.get(kind.name, F.lit(None)).cast(kind.dataType).alias(kind.name) for kind in kinds.fields)
        )

    def _check_columns(self, schema: StructType) -> None:
        target = f"sink {self.name}"
        require_columns(schema.names, target, ["value"] if self.topic is not None else ["value", TARGET_TOPIC])
        for name in ("key", "value", *(() if self.topic is not None else (TARGET_TOPIC,))):
            if name in schema.names and not isinstance(schema[name].dataType, StringType | BinaryType):
                raise SchemaMismatchError(
                    f"column {name} of the frame for {target} is {schema[name].dataType.simpleString()}; messages are "
                    f"text or bytes: cast it, or make text of it with to_json(...)"
                )
        headers = schema["headers"].dataType if "headers" in schema.names else None
        if headers is not None and headers.simpleString() != _HEADERS:
            raise SchemaMismatchError(
                f"column headers of the frame for {target} is {headers.simpleString()}, not {_HEADERS}; shape it so"
            )
