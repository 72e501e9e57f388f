"""What the driver asks of Kafka: which partitions there are, where their logs begin and where they end.

Under read_committed a log ends at its last stable offset: an open transaction holds it there. Offsets are
asked of the admin side, because a consumer's watermarks name the high watermark whatever its isolation.
"""

from __future__ import annotations

from collections.abc import Iterable

from confluent_kafka import Consumer, IsolationLevel, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec  # type: ignore[attr-defined] # not in its __all__

from penstock import kafka
from penstock.errors import ConfigurationError, SourceError
from penstock.spark_sink import planning
from penstock.spark_sink.options import SourceOptions
from penstock.spark_sink.planning import Offsets


class LogView:
    """A view on the brokers for one query. One thread uses it; `close` lets the connection go.

    Raises:
        ConfigurationError: the client library refuses a `kafka.` option.
    """

    def __init__(self, options: SourceOptions) -> None:
        self._options = options
        _refuse_wrong_settings(options)
        self._admin: AdminClient = kafka.admin_client(options.bootstrap_servers, options.client)

    def partitions(self) -> list[planning.TopicPartition]:
        """Return the partitions the query reads, as they are now.

        Raises:
            BrokerConnectionError: no broker answered.
            TopicNotFoundError: a named topic or partition does not exist.
        """
        return self._options.selection.pick(self._counts())

    def existing(self) -> list[planning.TopicPartition]:
        """Return those of the partitions the query reads that there are, whatever has been deleted since it began.

        Raises:
            BrokerConnectionError: no broker answered.
        """
        return self._options.selection.pick_existing(self._counts())

    def _counts(self) -> dict[str, int]:
        return kafka.partition_counts(self._admin, self._options.bootstrap_servers)

    def earliest(self, partitions: Iterable[planning.TopicPartition]) -> Offsets:
        """Return the first offset each log still holds."""
        return self._offsets(partitions, OffsetSpec.earliest())  # type: ignore[no-untyped-call] # untyped in the library

    def latest(self, partitions: Iterable[planning.TopicPartition]) -> Offsets:
        """Return the offset after the last one that may be read: the last stable one under read_committed."""
        return self._offsets(partitions, OffsetSpec.latest())  # type: ignore[no-untyped-call] # untyped in the library

    def _offsets(self, partitions: Iterable[planning.TopicPartition], spec: OffsetSpec) -> Offsets:
        asked = {TopicPartition(topic, partition): spec for topic, partition in partitions}
        if not asked:
            return {}
        isolation = IsolationLevel.READ_COMMITTED if self._options.read_committed else IsolationLevel.READ_UNCOMMITTED
        futures = self._admin.list_offsets(asked, isolation_level=isolation, request_timeout=kafka.CONNECT_TIMEOUT_S)
        found: Offsets = {}
        for part, future in futures.items():
            try:
                found[(part.topic, part.partition)] = future.result().offset
            except KafkaException as error:
                raise SourceError(
                    f"the offsets of {part.topic}[{part.partition}] could not be read at "
                    f"{self._options.bootstrap_servers}: {kafka.reason(error)}; check that its leader is up and "
                    "that this client may describe the topic"
                ) from error
        return found


def consumer_config(options: SourceOptions) -> dict[str, object]:
    """Return the settings of a reading task's consumer: the user's, and those reading a range depends on."""
    return kafka.base_config(
        options.bootstrap_servers,
        {
            # The library wants a group name; partitions are assigned by hand, so no group is ever joined.
            "group.id": "penstock-spark",
            # An empty answer tells the end of a partition: the broker shall not hold it back for half a second.
            "fetch.wait.max.ms": 20,
            # What the library fetches ahead is memory beside the Arrow batch: 32 MB a task.
            "queued.max.messages.kbytes": 32 * 1024,
            "fetch.queue.backoff.ms": 5,
            **options.client,
            "enable.auto.commit": False,
            "enable.auto.offset.store": False,
            "enable.partition.eof": True,
            # Offsets that are gone must be named, never jumped over.
            "auto.offset.reset": "error",
        },
    )


def _refuse_wrong_settings(options: SourceOptions) -> None:
    """Let the library judge the settings on the driver, so that no task is started with wrong ones."""
    try:
        Consumer(consumer_config(options)).close()
    except KafkaException as error:
        raise ConfigurationError(
            f"the Kafka client refused an option kafka.*: {kafka.reason(error)}; its names are librdkafka's, "
            "which differ from the Java client's in security settings"
        ) from error


__all__ = ["LogView", "consumer_config"]
