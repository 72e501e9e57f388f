"""How long tasks of a batch that failed or was cancelled may still handle messages.

Spark tells the driver at once that a job is over. The Python process of a task, which may be in a handler, is seen to
by a thread of the executor that looks every 2 seconds, waits `spark.python.task.killTimeout` for the task to end by
itself, and then kills the process (`PythonRunner`'s `MonitorThread`). Whoever lets the batch come again before that
has two handlers of one key at once.
"""

from __future__ import annotations

import re

from pyspark.sql import SparkSession

#: Seconds between the looks of the executor's thread, and what its kill may take to come about.
_LOOK_S = 2.0
_GRACE_S = 2.0
_TIME = re.compile(r"(\d+) *(ms|s|m|min|h)?")
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}


def seconds_until_killed(spark: SparkSession) -> float:
    """Return the seconds after which no process of a cancelled task is left."""
    return _LOOK_S + _seconds(str(spark.conf.get("spark.python.task.killTimeout", "2s"))) + _GRACE_S


def _seconds(text: str) -> float:
    """Return a time as Spark writes it, in seconds; its default where it is written in another way."""
    found = _TIME.fullmatch(text.strip())
    # A number alone means milliseconds, as everywhere in Spark's times.
    return int(found[1]) * _SECONDS[found[2] or "ms"] if found else 2.0
