"""What of an app takes sinks: `@app.sink`, and what was declared with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from penstock import options as check
from penstock.errors import ConfigurationError
from penstock.spark_sink.queries.sink_specs import SinkFunction, SinkSpec, group_of_sinks, require_own_names

FunctionT = TypeVar("FunctionT", bound=Callable[..., object])


class SinkRegistry:
    """The sinks of an app. Registering is for one thread."""

    #: Name of the app.
    name: str
    _sinks: list[SinkSpec]

    def sink(
        self,
        *topics: str,
        sink: SinkFunction | None = None,
        trigger: str = "5 seconds",
        name: str | None = None,
        checkpoint_location: str | None = None,
        starting_offsets: str = "earliest",
        options: Mapping[str, str] | None = None,
        output_mode: str = "append",
        restarts: int = 10,
        group: str | None = None,
    ) -> Callable[[FunctionT], FunctionT]:
        """Register what takes Spark's micro-batches of one topic or several: a function `(batch, batch_id)` or a sink.

        The batches hold committed messages only, with the columns of Spark's Kafka source. They run in the process's
        Spark session, or in a new one that ends with the app; make your own before `start` to configure it. Of several
        replicas of the app one runs a sink, and of `penstock run --processes N` the first process at most. A query that
        fails is started again after 1 to 60 seconds; a stop lets the batch under way end, within the app's
        `stop_timeout`.

        Args:
            topics: names of the topics.
            sink: what stores the batches, such as a `SqlSink`. The decorated function then makes the rows: it is
                called once, with the streaming frame of the messages, and returns the frame to store. A sink with a
                method `check(schema)` is asked before the query begins.
            trigger: an interval such as "5 seconds", or "available now" to end when all is read.
            name: name of the query; the app's and the function's when left out.
            checkpoint_location: where Spark keeps its progress. A function, and a sink without a ledger such as a
                `handler_sink` without a name, need one, or a folder of the session's
                (`spark.sql.streaming.checkpointLocation`). A sink with a ledger, such as `SqlSink`, goes on where that
                says when there is none, or it is lost.
            starting_offsets: "earliest" (default), "latest" or Spark's JSON, where neither checkpoint nor ledger know
                the query yet.
            options: further options of the source by Spark's names: `maxOffsetsPerTrigger` bounds a batch, without it
                the first one holds all that is there.
            output_mode: "append" (default), "update" or "complete": which rows of an aggregate a batch has, as Spark
                says. Aggregates need a sink such as `SqlSink` with mode="batch".
            restarts: restarts in a row without a committed batch in between, at most; the next failure stops the app.
            group: consumer group whose offsets follow the committed batches, for lag tools; for this query alone.

        Raises:
            ConfigurationError: an option is wrong, the function cannot be called, or another sink has its name.
        """
        names = check.names("topic", topics)

        def register(function: FunctionT) -> FunctionT:
            check.a_callable("sink", function)
            given: Any = function  # of one signature or the other, by whether there is a sink
            spec = SinkSpec(
                topics=names,
                function=given if sink is None else sink,
                rows=None if sink is None else given,
                trigger=trigger,
                name=name or f"{self.name}-{getattr(function, '__name__', type(function).__name__)}",
                checkpoint_location=checkpoint_location,
                starting_offsets=starting_offsets,
                options=dict(options or {}),
                output_mode=output_mode,
                restarts=restarts,
                group=group,
            )
            require_own_names([*self._sinks, spec])
            if group == group_of_sinks(self.name):
                raise ConfigurationError(f"group={group!r} is the group of all sinks of the app; give another one")
            self._sinks.append(spec)
            return function

        return register

    @property
    def sinks(self) -> Sequence[SinkSpec]:
        """The sinks, in the order of their declaration."""
        return tuple(self._sinks)
