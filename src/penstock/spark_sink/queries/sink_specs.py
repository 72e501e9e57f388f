"""`@app.sink`: the declared sinks of an app, checked without Spark, and the process in which they run."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, TypedDict, TypeVar, Unpack

from penstock import options as check
from penstock.consumer.handlers.functions import context_parameters, name_of
from penstock.errors import ConfigurationError
from penstock.option_list import takes_options
from penstock.options import PROCESS_VARIABLE

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_log = logging.getLogger("penstock.spark_sink")

FunctionT = TypeVar("FunctionT", bound=Callable[..., object])
#: Stores a micro-batch, given with its number; a batch may come twice.
SinkFunction = Callable[["DataFrame", int], None]
#: Makes the frame to store from a frame of messages.
RowsFunction = Callable[["DataFrame"], "DataFrame"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SinkSpec:
    """A declared sink.

    Attributes:
        function: called with each batch.
        rows: makes the frame to store from the frame of messages; None: the messages themselves.

    The other attributes are the options of `App.sink`.
    """

    topics: tuple[str, ...]
    function: SinkFunction
    rows: RowsFunction | None = None
    name: str
    trigger: str = "5 seconds"
    checkpoint_location: str | None = None
    starting_offsets: str = "earliest"
    options: Mapping[str, str] | None = None
    output_mode: str = "append"
    restarts: int = 10

    def __post_init__(self) -> None:
        """Check the settings as far as possible without Spark; `ConfigurationError` names a wrong one."""
        check.not_empty("trigger", self.trigger)
        check.not_empty("name", self.name)
        check.a_callable("sink", self.function)
        check.one_of("output_mode", self.output_mode, "append", "update", "complete")
        check.not_negative("restarts", self.restarts)
        if self.checkpoint_location is not None:
            check.not_empty("checkpoint_location", self.checkpoint_location)
        for function in (self.function, self.rows):
            if function is not None and context_parameters(function):
                raise ConfigurationError(
                    f"sink {name_of(function)} takes a Context, which handlers alone are given; Spark calls it with a "
                    "frame, and with a batch's number where there is no sink="
                )


class QueryOptions(TypedDict, total=False):
    """The options of a query, for `start_sink` and `App.sink`."""

    trigger: str
    checkpoint_location: str | None
    starting_offsets: str
    options: Mapping[str, str] | None
    output_mode: str


class SinkOptions(QueryOptions, total=False):
    """The options of `App.sink`."""

    restarts: int


#: Defaults of the options.
_DEFAULTS = {option.name: option.default for option in fields(SinkSpec)}
QUERY_DEFAULTS = {name: _DEFAULTS[name] for name in QueryOptions.__annotations__}
SINK_DEFAULTS = {name: _DEFAULTS[name] for name in SinkOptions.__annotations__}


def group_of_sinks(app: str) -> str:
    """Return the consumer group that assigns each sink of an app to one replica."""
    return f"{app}-sinks"


class SinkRegistry:
    """The part of an app that registers sinks. Register from one thread."""

    #: Name of the app.
    name: str
    _sinks: list[SinkSpec]

    @takes_options(SinkOptions, SINK_DEFAULTS)
    def sink(
        self, *topics: str, sink: SinkFunction | None = None, name: str | None = None, **given: Unpack[SinkOptions]
    ) -> Callable[[FunctionT], FunctionT]:
        """Register a sink for Spark's micro-batches of one topic or several: a function `(batch, batch_id)` or a sink.

        Batches contain committed messages only, with the columns of Spark's Kafka source. They run in the process's
        Spark session, or in a new one that ends with the app. To configure it, make your own before `start`. One
        replica of the app runs a sink; with `penstock run --processes N`, only the first process can. A failed query is
        restarted after 1 to 60 seconds. A stop waits for the batch under way, within the app's `stop_timeout`.

        Args:
            topics: names of the topics.
            sink: the sink that stores the batches, such as a `SqlSink`. The decorated function then makes the rows: it
                is called once, with the streaming frame of the messages, and returns the frame to store. If the sink
                has a method `check(schema)`, it is called before the query begins.
            trigger: an interval such as "5 seconds", or "available now" to end when all is read.
            name: name of the query; default: the app's and the function's name.
            checkpoint_location: folder of Spark's progress. A function, or a sink without a ledger, such as a
                `handler_sink` without a name, needs one, or a folder of the session
                (`spark.sql.streaming.checkpointLocation`). A sink with a ledger, such as `SqlSink`, continues from its
                ledger if there is no checkpoint, or it is lost.
            starting_offsets: "earliest" (default), "latest" or Spark's JSON, for a query that neither checkpoint nor
                ledger knows.
            options: more options of the source by Spark's names. `maxOffsetsPerTrigger` limits a batch; without it the
                first batch has the whole backlog.
            output_mode: "append" (default), "update" or "complete": the rows of an aggregate in a batch, as in Spark.
                Aggregates need a sink such as `SqlSink` with mode="batch".
            restarts: most restarts in a row without a committed batch; the next failure stops the app.

        Raises:
            ConfigurationError: an option is wrong, the function cannot be called, or another sink has its name.
        """
        names = check.names("topic", topics)

        def register(function: FunctionT) -> FunctionT:
            check.a_callable("sink", function)
            stores: Any = function  # with one signature or the other, depending on `sink`
            spec = SinkSpec(
                topics=names,
                function=stores if sink is None else sink,
                rows=None if sink is None else stores,
                name=name or f"{self.name}-{getattr(function, '__name__', type(function).__name__)}",
                **given,
            )
            for what in ("name", "checkpoint_location"):
                value = getattr(spec, what)
                if value is not None and value in [getattr(other, what) for other in self._sinks]:
                    raise ConfigurationError(
                        f"two sinks have the {what} {value!r}; each needs its own: give one of them another {what}="
                    )
            self._sinks.append(spec)
            return function

        return register

    @property
    def sinks(self) -> Sequence[SinkSpec]:
        """The sinks, in order of declaration."""
        return tuple(self._sinks)


def in_first_process(name: str, *, alone: bool) -> bool:
    """Return whether the sinks run in this process: with `penstock run --processes N`, only in the first.

    An app with sinks `alone` has nothing to do in other processes: that raises `ConfigurationError`.
    """
    if os.environ.get(PROCESS_VARIABLE, "1") == "1":
        return True
    if alone:
        raise ConfigurationError(f"app {name} has sinks only, which run in one process; leave --processes out")
    _log.info("the sinks of %s run in process 1 only", name)
    return False
