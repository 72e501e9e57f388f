"""Settings of Spark under which it would run a task of a batch beside another run of the same task."""

from __future__ import annotations

import re

from pyspark.sql import SparkSession

from penstock.errors import ConfigurationError

#: Masters whose tasks run in the driver's own JVM: no executor can be lost there.
_LOCAL = re.compile(r"local(\[.*\])?")

_ATTEMPTS = "spark.stage.maxConsecutiveAttempts"
_IGNORED = "spark.stage.ignoreDecommissionFetchFailure"

#: What else ends each of the errors.
_OR = "; or give the sink overlap='allowed' if its handlers are idempotent"


def refuse_double_runs(spark: SparkSession) -> None:
    """Raise `ConfigurationError` for settings under which two handlers of one key may run at once (I1).

    Speculation runs a slow task twice. And where a task cannot fetch what a lost executor had for it, Spark runs the
    stage again beside those of its tasks that still run (SPARK-20163); with one attempt it gives the job up and kills
    them (SPARK-50648), and the batch comes again. Fetches from executors that are decommissioned count as attempts only
    where they are told to.
    """
    if _is_on(spark, "spark.speculation", "false"):
        raise ConfigurationError(
            "spark.speculation is on: Spark would run a slow task twice at once, and so two handlers of one key; turn "
            f"it off for this application{_OR}"
        )
    if _LOCAL.fullmatch(str(spark.conf.get("spark.master", "local"))):
        return
    if str(spark.conf.get(_ATTEMPTS, "4")).strip() != "1":
        raise ConfigurationError(
            f"{_ATTEMPTS} is not 1: when an executor is lost, Spark would run the rest of a batch again beside its "
            "tasks that still run, and so two handlers of one key; start the application with "
            f"--conf {_ATTEMPTS}=1, and the batch comes again as a whole{_OR}"
        )
    if _is_on(spark, "spark.decommission.enabled", "false") and _is_on(spark, _IGNORED, "true"):
        raise ConfigurationError(
            "spark.decommission.enabled is on: when an executor goes, Spark would run the rest of a batch again beside "
            "its tasks that still run, and so two handlers of one key; start the application with "
            f"--conf {_IGNORED}=false as well{_OR}"
        )


def _is_on(spark: SparkSession, setting: str, default: str) -> bool:
    return str(spark.conf.get(setting, default)).strip().lower() == "true"
