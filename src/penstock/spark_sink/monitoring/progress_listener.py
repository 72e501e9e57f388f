"""`ProgressListener`: Spark's reports of its queries, as OpenTelemetry metrics and as offsets of consumer groups."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from pyspark.sql.streaming.listener import (
    QueryIdleEvent,
    QueryProgressEvent,
    QueryStartedEvent,
    QueryTerminatedEvent,
    StreamingQueryListener,
)

from penstock.errors import ConfigurationError
from penstock.options import ClientConfig
from penstock.spark_sink.monitoring.group_offsets import GroupOffsets
from penstock.spark_sink.monitoring.progress_publisher import ProgressPublisher

if TYPE_CHECKING:
    from penstock.telemetry.settings import Telemetry


class PublisherListener(StreamingQueryListener):
    """Hands Spark's reports to a publisher that somebody else keeps."""

    def __init__(self, publisher: ProgressPublisher) -> None:
        self._publisher = publisher

    def onQueryStarted(self, event: QueryStartedEvent) -> None:  # noqa: N802 - Spark's name
        """Wait for its first batch."""

    def onQueryProgress(self, event: QueryProgressEvent) -> None:  # noqa: N802 - Spark's name
        """Take the report of a batch."""
        self._publisher.take(event.progress.json)

    def onQueryIdle(self, event: QueryIdleEvent) -> None:  # noqa: N802 - Spark's name
        """Leave it as it is: an idle query is where its last batch ended."""

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:  # noqa: N802 - Spark's name
        """Leave it as it is: the query may be started again."""


class ProgressListener(PublisherListener):
    """Listens to the queries of a session: `spark.streams.addListener(ProgressListener(Telemetry()))`.

    `App` has one of its own for its sinks; this is for queries that are started by hand. Close it when it is removed.

    Args:
        telemetry: where metrics go; None for nowhere.
        groups: for a query's name, the consumer group that shows its position; a group belongs to one query.
        sinks: for a query's name, its sink, which is asked for its ledger where it has one.
        bootstrap_servers: addresses of the brokers, for groups.
        config: client settings by librdkafka's names, for groups.

    Raises:
        ConfigurationError: groups without bootstrap_servers, or the Kafka client refused a setting.
    """

    def __init__(
        self,
        telemetry: Telemetry | None = None,
        *,
        groups: Mapping[str, str] | None = None,
        sinks: Mapping[str, object] | None = None,
        bootstrap_servers: str | None = None,
        config: ClientConfig | None = None,
    ) -> None:
        if groups and bootstrap_servers is None:
            raise ConfigurationError("groups are kept by the brokers: give bootstrap_servers as well")
        publisher = ProgressPublisher(
            telemetry,
            groups={
                query: GroupOffsets(group, bootstrap_servers=bootstrap_servers or "", config=config)
                for query, group in (groups or {}).items()
            },
            sinks=sinks,
        )
        super().__init__(publisher)

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:  # noqa: N802 - Spark's name
        """Show it no more."""
        self._publisher.forget(str(event.runId))

    def close(self) -> None:
        """Write the last offsets to the groups and show nothing any more."""
        self._publisher.close()
