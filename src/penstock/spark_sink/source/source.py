"""The Data Source `penstock`: Kafka for Spark without jars, committed messages only unless asked otherwise.

The driver plans offsets (`plan`, over what `brokers` says), tasks read them (`reading`). Columns and
options are those of Spark's own Kafka source, so a query moves between the two by changing one word.
"""

from __future__ import annotations

from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader
from pyspark.sql.types import StructType

from penstock.errors import ConfigurationError
from penstock.spark_sink.source.batch import BatchReader
from penstock.spark_sink.source.columns import source_schema
from penstock.spark_sink.source.options import SourceOptions
from penstock.spark_sink.source.session import prepare_environment, use_this_python
from penstock.spark_sink.source.stream import StreamReader


def register(spark: SparkSession) -> None:
    """Make `spark.read.format("penstock")` and `spark.readStream.format("penstock")` known to a session.

    Executors need penstock importable: on a local master Spark's workers run this process's Python from here on, unless
    `PYSPARK_PYTHON` says another; elsewhere set it. Registering twice does no harm.
    """
    use_this_python(spark)
    spark.dataSource.register(PenstockSource)
    prepare_environment(spark, PenstockSource.name())


class PenstockSource(DataSource):
    """The entry Spark calls; see `register` and `penstock.spark_sink.source.options` for the options."""

    @classmethod
    def name(cls) -> str:
        """Return the word for `format(...)`."""
        return "penstock"

    def schema(self) -> StructType:
        """Return the columns of Spark's Kafka source; wrong options end here, before anything starts."""
        return source_schema(include_headers=SourceOptions.parse(self.options).include_headers)

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return the reader of a batch query."""
        options = SourceOptions.parse(self.options).for_batch()
        _refuse_other_schema(schema, options)
        return BatchReader(options)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802 - Spark's name
        """Return the reader of a streaming query."""
        options = SourceOptions.parse(self.options).for_stream()
        _refuse_other_schema(schema, options)
        return StreamReader(options)


def _refuse_other_schema(schema: StructType, options: SourceOptions) -> None:
    fixed = source_schema(include_headers=options.include_headers)
    if schema.fieldNames() != fixed.fieldNames():
        raise ConfigurationError(
            f"the source penstock has the columns {', '.join(fixed.fieldNames())} and takes no other schema; "
            "leave .schema(...) out and parse the value in the query"
        )
