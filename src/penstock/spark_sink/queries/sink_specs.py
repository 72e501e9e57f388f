"""What an app says of its sinks, checked without Spark, and where they run."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from penstock import options as check
from penstock.consumer.handlers.context import context_parameters
from penstock.consumer.handlers.functions import name_of
from penstock.errors import ConfigurationError
from penstock.options import PROCESS_VARIABLE

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

_log = logging.getLogger("penstock.spark_sink")

#: Stores a micro-batch, whose number is given with it; a batch may come twice.
SinkFunction = Callable[["DataFrame", int], None]
#: Makes the rows to store of a frame of messages.
RowsFunction = Callable[["DataFrame"], "DataFrame"]


@dataclass(frozen=True, slots=True)
class SinkSpec:
    """A declared sink: what it reads, when, and what gets each batch.

    Attributes:
        topics: names of the topics.
        function: gets each batch.
        rows: makes of the messages the frame whose batches it gets; None for the messages as they are.
        trigger: an interval, or "available now".
        name: name of the query.
        checkpoint_location: where Spark keeps its progress, or None.
        starting_offsets: where a query without checkpoint begins.
        options: further options of the source.
        output_mode: Spark's, of aggregates.
        restarts: restarts in a row without a committed batch in between, at most.
        group: consumer group that shows the position, or None.
    """

    topics: tuple[str, ...]
    function: SinkFunction
    rows: RowsFunction | None
    trigger: str
    name: str
    checkpoint_location: str | None
    starting_offsets: str
    options: Mapping[str, str]
    output_mode: str = "append"
    restarts: int = 0
    group: str | None = None

    def __post_init__(self) -> None:
        """Check what can be checked without Spark; a `ConfigurationError` names a wrong setting."""
        check.not_empty("trigger", self.trigger)
        check.not_empty("name", self.name)
        check.a_callable("sink", self.function)
        if self.output_mode not in ("append", "update", "complete"):
            raise ConfigurationError(f"output_mode must be append, update or complete, but is {self.output_mode!r}")
        if isinstance(self.restarts, bool) or not isinstance(self.restarts, int) or self.restarts < 0:
            raise ConfigurationError(f"restarts must be a whole number of at least 0, but is {self.restarts!r}")
        if self.group is not None:
            check.not_empty("group", self.group)
        for function in (self.function, self.rows):
            if function is not None and context_parameters(function):
                raise ConfigurationError(
                    f"sink {name_of(function)} takes a Context, which handlers alone are given; Spark calls it with a "
                    "frame, and with a batch's number where there is no sink="
                )


def group_of_sinks(app: str) -> str:
    """Return the consumer group by whose assignment one replica of an app runs a sink."""
    return f"{app}-sinks"


def require_own_names(specs: Sequence[SinkSpec]) -> None:
    """Raise `ConfigurationError` where two sinks of an app share a name, a group or a checkpoint."""
    for what in ("name", "group", "checkpoint_location"):
        given = [value for one in specs if (value := getattr(one, what)) is not None]
        twice = sorted({value for value in given if given.count(value) > 1})
        if twice:
            raise ConfigurationError(
                f"two sinks have the {what} {twice[0]!r}; each needs its own: give one of them another {what}="
            )


def in_first_process(name: str, *, alone: bool) -> bool:
    """Tell whether the sinks run in this process: several queries on one checkpoint would stop one another.

    An app that is `alone`, with sinks only, has nothing to do in other processes: a `ConfigurationError`.
    """
    if os.environ.get(PROCESS_VARIABLE, "1") == "1":
        return True
    if alone:
        raise ConfigurationError(f"app {name} has sinks only, which run in one process; leave --processes out")
    _log.info("the sinks of %s run in process 1 only", name)
    return False
