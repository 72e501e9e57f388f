"""Prepares a Spark session: workers that run this process's Python, and a quiet log.

It uses private parts of PySpark if there is no public way. If a part is missing, nothing is changed, and Spark behaves
as without penstock.
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

#: Loggers of the JVM that write stacks of failures, which are logged as a sentence anyway; and the logger that warns
#: when a source is registered again, as ours is for each query.
_NOISY = (
    "org.apache.spark.executor.Executor",
    "org.apache.spark.scheduler.TaskSetManager",
    "org.apache.spark.sql.execution.datasources.DataSourceManager",
    "org.apache.spark.sql.execution.datasources.v2.WriteToDataSourceV2Exec",
    "org.apache.spark.sql.execution.streaming.runtime.MicroBatchExecution",
)


def is_classic(spark: SparkSession) -> bool:
    """Tell whether this process is Spark's driver. Under Spark Connect, the server is."""
    from pyspark.sql.utils import is_remote

    return not is_remote() and type(spark).__module__ == "pyspark.sql.session"


def require_classic(spark: SparkSession) -> None:
    """Raise `ConfigurationError` under Spark Connect, which reveals neither the query of a batch nor its plan."""
    if not is_classic(spark):
        raise ConfigurationError(
            "sinks need a session whose driver is this process, and this one is of Spark Connect: run the program "
            "where the driver runs; the source alone works here, with sinks of Spark's"
        )


def is_stopped(spark: SparkSession) -> bool:
    """Tell whether a session of this process's driver was stopped."""
    context: Any = spark.sparkContext
    return context._jsc is None or bool(context._jsc.sc().isStopped())  # noqa: SLF001 - PySpark has no public way to ask


def new_session(name: str) -> SparkSession:
    """Return a new session for an app that found none.

    `spark-defaults.conf` and `PYSPARK_SUBMIT_ARGS` configure it. Progress bars, which PySpark turns on for terminals,
    are off. So are the JVM's stacks of failures, which bury the sentence with the remedy, unless penstock's log level
    is DEBUG.
    """
    from pyspark.sql import SparkSession

    quiet, py4j = not _log.isEnabledFor(logging.DEBUG), logging.getLogger("py4j")
    if quiet and py4j.level == logging.NOTSET:
        py4j.setLevel(logging.WARNING)  # at INFO it logs every call
    spark = SparkSession.builder.appName(name).config("spark.ui.showConsoleProgress", "false").getOrCreate()
    try:
        jvm: Any = spark.sparkContext._jvm  # noqa: SLF001 - PySpark has no public way to its JVM
        log4j = jvm.org.apache.logging.log4j
        for noisy in _NOISY if quiet else ():
            log4j.core.config.Configurator.setLevel(noisy, log4j.Level.OFF)
    except Exception:  # noqa: BLE001 - another logging library, or none: its stacks stay
        _log.debug("Spark's log could not be made quieter", exc_info=True)
    return spark


def use_this_python(spark: SparkSession) -> None:
    """Make the workers of a local Spark run this process's Python, which has the required packages.

    Without `PYSPARK_PYTHON`, PySpark starts the `python3` of the PATH. On a cluster nothing is changed: this Python may
    not exist there.
    """
    if not is_classic(spark) or os.environ.get("PYSPARK_PYTHON"):
        return
    context: Any = spark.sparkContext
    if str(context.master).startswith("local"):
        context.pythonExec = sys.executable
