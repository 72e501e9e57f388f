"""What a Spark session needs of this process: its Python, and a quiet log.

It reaches into PySpark's private parts where there is no public way. What it does not find there it leaves as it is:
then Spark behaves as it does without penstock.
"""

from __future__ import annotations

import logging
import os
import sys
from typing import TYPE_CHECKING, Any

from penstock.errors import ConfigurationError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_log = logging.getLogger("penstock.spark_sink")

#: Loggers of the JVM that write the stack of a failure, which is logged in a sentence anyway; and the one that warns of
#: a source that is registered again, as ours is for each query.
_NOISY = (
    "org.apache.spark.executor.Executor",
    "org.apache.spark.scheduler.TaskSetManager",
    "org.apache.spark.sql.execution.datasources.DataSourceManager",
    "org.apache.spark.sql.execution.datasources.v2.WriteToDataSourceV2Exec",
    "org.apache.spark.sql.execution.streaming.runtime.MicroBatchExecution",
)


def is_classic(spark: SparkSession) -> bool:
    """Tell whether Spark's driver is this process; under Spark Connect it is where the server is."""
    from pyspark.sql.utils import is_remote

    return not is_remote() and type(spark).__module__ == "pyspark.sql.session"


def require_classic(spark: SparkSession) -> None:
    """Raise `ConfigurationError` under Spark Connect, which says of a batch neither its query nor what was planned."""
    if not is_classic(spark):
        raise ConfigurationError(
            "sinks need a session whose driver is this process, and this one is of Spark Connect: run the program "
            "where the driver runs; the source alone works here, with sinks of Spark's"
        )


def is_stopped(spark: SparkSession) -> bool:
    """Tell whether a session whose driver is this process was stopped."""
    context: Any = spark.sparkContext
    return context._jsc is None or bool(context._jsc.sc().isStopped())  # noqa: SLF001 - PySpark has no public way to ask


def new_session(name: str) -> SparkSession:
    """Return a new session for an app that found none.

    It is configured by `spark-defaults.conf` and `PYSPARK_SUBMIT_ARGS`. Without progress bars, which PySpark turns on
    and which are for terminals; and without the JVM's stacks of what fails, which bury the sentence that says what to
    do, unless penstock's log is at the level DEBUG.
    """
    from pyspark.sql import SparkSession

    quiet, py4j = not _log.isEnabledFor(logging.DEBUG), logging.getLogger("py4j")
    if quiet and py4j.level == logging.NOTSET:
        py4j.setLevel(logging.WARNING)  # it tells of every call, at INFO
    spark = SparkSession.builder.appName(name).config("spark.ui.showConsoleProgress", "false").getOrCreate()
    if quiet:
        _silence(spark, _NOISY)
    return spark


def _silence(spark: SparkSession, loggers: tuple[str, ...]) -> None:
    try:
        jvm: Any = spark.sparkContext._jvm  # noqa: SLF001 - PySpark has no public way to its JVM
        log4j = jvm.org.apache.logging.log4j
        for name in loggers:
            log4j.core.config.Configurator.setLevel(name, log4j.Level.OFF)
    except Exception:  # noqa: BLE001 - another logging library, or none: its stacks stay
        _log.debug("Spark's log could not be made quieter", exc_info=True)


def use_this_python(spark: SparkSession) -> None:
    """Let the workers of a local Spark run this process's Python, which has the packages that are needed.

    PySpark starts the `python3` of the PATH where `PYSPARK_PYTHON` is not set. On a cluster, what is right here may not
    be there, so that nothing is changed.
    """
    if not is_classic(spark) or os.environ.get("PYSPARK_PYTHON"):
        return
    context: Any = spark.sparkContext
    if str(context.master).startswith("local"):
        context.pythonExec = sys.executable
