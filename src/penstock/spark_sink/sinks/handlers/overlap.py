"""Whether two handlers of one key may run at once (I1): settings of Spark that let them, and tasks that were cancelled.

Spark tells the driver at once that a job is over. The Python process of a task, which may be in a handler, is left to
a thread of the executor that looks every 2 seconds, waits `spark.python.task.killTimeout` for the task to end by
itself, and then kills the process (`PythonRunner`'s `MonitorThread`). A batch that came again before that would have
two handlers of one key at once.
"""

from __future__ import annotations

import re

from pyspark.sql import SparkSession

from penstock.errors import ConfigurationError

#: Masters whose tasks run in the driver's own JVM: no executor can be lost there.
_LOCAL = re.compile(r"local(\[.*\])?")

_ATTEMPTS = "spark.stage.maxConsecutiveAttempts"
_IGNORED = "spark.stage.ignoreDecommissionFetchFailure"

#: Seconds between the looks of the executor's thread, and what its kill may take to come about.
_LOOK_S = 2.0
_GRACE_S = 2.0
_TIME = re.compile(r"(\d+) *(ms|s|m|min|h)?")
#: A number alone means milliseconds, as everywhere in Spark's times.
_SECONDS = {None: 0.001, "ms": 0.001, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}


def refuse_double_runs(spark: SparkSession) -> None:
    """Raise `ConfigurationError` for settings under which two handlers of one key may run at once (I1).

    Speculation runs a slow task twice. And where a task cannot fetch what a lost executor had for it, Spark runs the
    stage again while some of its tasks still run (SPARK-20163); with one attempt it gives the job up and kills them
    (SPARK-50648), and the batch comes again. Fetches from executors that are decommissioned count as attempts only
    where a setting says so.
    """

    def is_set(name: str, default: str, to: str = "true") -> bool:
        return str(spark.conf.get(name, default)).strip().lower() == to

    again = "Spark would run the rest of a batch again beside its tasks that still run, and so two handlers of one key"
    if is_set("spark.speculation", "false"):
        what = (
            "spark.speculation is on: Spark would run a slow task twice at once, and so two handlers of one key; turn "
            "it off for this application"
        )
    elif _LOCAL.fullmatch(str(spark.conf.get("spark.master", "local"))):
        return
    elif not is_set(_ATTEMPTS, "4", "1"):
        what = (
            f"{_ATTEMPTS} is not 1: when an executor is lost, {again}; start the application with --conf {_ATTEMPTS}=1,"
            " and the batch comes again as a whole"
        )
    elif is_set("spark.decommission.enabled", "false") and is_set(_IGNORED, "true"):
        what = (
            f"spark.decommission.enabled is on: when an executor goes, {again}; start the application with --conf "
            f"{_IGNORED}=false as well"
        )
    else:
        return
    raise ConfigurationError(f"{what}; or give the sink overlap='allowed' if its handlers are idempotent")


def seconds_until_killed(spark: SparkSession) -> float:
    """Return the seconds after which no process of a cancelled task is left."""
    found = _TIME.fullmatch(str(spark.conf.get("spark.python.task.killTimeout", "2s")).strip())
    # Spark's default where it is written in another way.
    timeout_s = 2.0 if found is None else int(found[1]) * _SECONDS[found[2]]
    return _LOOK_S + timeout_s + _GRACE_S
