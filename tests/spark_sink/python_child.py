"""Runs a query by hand where no PYSPARK_PYTHON is set and the `python3` of the PATH is another; prints its rows."""

from __future__ import annotations

import sys

from pyspark.sql import SparkSession

from penstock.spark_sink import register

if __name__ == "__main__":
    spark = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false").getOrCreate()
    register(spark)
    options = {"kafka.bootstrap.servers": sys.argv[1], "subscribe": sys.argv[2]}
    frame = spark.read.format("penstock").options(**options).load()
    print([bytes(row.value) for row in frame.select("value").collect()])  # noqa: T201 - a child's report
    spark.stop()
