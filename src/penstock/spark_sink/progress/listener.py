"""`ProgressListener`: shows the queries of a session that no app has."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from pyspark.sql.streaming.listener import (
    QueryProgressEvent,
    QueryStartedEvent,
    QueryTerminatedEvent,
    StreamingQueryListener,
)

from penstock.errors import ConfigurationError
from penstock.options import ClientConfig
from penstock.spark_sink.progress.group_offsets import GroupOffsets
from penstock.spark_sink.progress.query_progress import QueryProgress
from penstock.spark_sink.progress.statistics import SinkStatistics

if TYPE_CHECKING:
    from penstock.telemetry.settings import Telemetry


class ProgressListener(StreamingQueryListener):
    """Listens to the queries of a session: `spark.streams.addListener(ProgressListener(Telemetry()))`.

    For queries that are started by hand; an app shows its sinks itself. Close it when it is removed. Spark calls the
    methods of events, on one thread.

    Args:
        telemetry: where metrics go; None for nowhere.
        groups: for a query's name, the consumer group that shows its position; a group belongs to one query.
        sinks: for a query's name, its sink, whose ledger is shown as its batches in this process left it.
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
        self._telemetry = telemetry
        #: By the name of a query, as all that follows.
        self._groups = {
            query: GroupOffsets(group, bootstrap_servers=bootstrap_servers or "", config=config)
            for query, group in (groups or {}).items()
        }
        self._sinks = dict(sinks or {})
        self._queries: dict[str, QueryProgress] = {}
        self._is_closed = False

    def onQueryStarted(self, event: QueryStartedEvent) -> None:  # noqa: N802 - Spark's name
        """Wait for its first batch."""

    def onQueryProgress(self, event: QueryProgressEvent) -> None:  # noqa: N802 - Spark's name
        """Take the report of a batch."""
        name = event.progress.name or str(event.progress.id)
        if name not in self._queries and not self._is_closed:
            self._queries[name] = QueryProgress(
                name, self._telemetry, group=self._groups.get(name), sink=self._sinks.get(name)
            )
        if name in self._queries:
            self._queries[name].take(event.progress)

    def onQueryTerminated(self, event: QueryTerminatedEvent) -> None:  # noqa: N802 - Spark's name
        """Show it no more."""
        for name in [name for name, query in self._queries.items() if query.run == event.runId]:
            self._queries.pop(name).close()

    def statistics(self, name: str) -> SinkStatistics:
        """Return what is known of a query that has reported and runs; any thread may ask."""
        return self._queries[name].statistics

    def close(self) -> None:
        """Write the last offsets to the groups and show nothing any more."""
        self._is_closed = True
        for query in self._queries.values():
            query.close()
        self._queries.clear()
        for group in self._groups.values():
            group.close()
