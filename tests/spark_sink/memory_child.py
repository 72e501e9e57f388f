"""Reads one partition to its end as a task of Spark's does, and prints what that took of memory.

It stands still before each take, as on a machine that is busy, so that the client library has fetched ahead all that it
may. Its output is JSON: the number of rows, the bytes of the largest record batch, and by how much the process grew, in
bytes, over what it had with everything imported.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from confluent_kafka import Consumer, Message
from pyspark.sql.pandas.types import to_arrow_schema

from penstock.clients import factory as making
from penstock.spark_sink.source import partition_reader as reading
from penstock.spark_sink.source.offsets.planning import OffsetRange
from penstock.spark_sink.source.options.options import SourceOptions
from penstock.spark_sink.source.tasks import source_schema

PAUSE_S = 0.03


class HesitantConsumer(Consumer):
    """Begins each take of more than one record late."""

    def consume(self, count: int = 1, wait_s: float = -1) -> list[Message]:
        if count > 1:
            # The hesitation is what is tested.
            time.sleep(PAUSE_S)
        return super().consume(count, wait_s)


def main(topic: str, rows: int, settings: dict[str, str]) -> None:
    options = SourceOptions.parse({"subscribe": topic, "includeHeaders": "true", **settings})
    schema = to_arrow_schema(source_schema(include_headers=True), timezone="UTC")
    making.Consumer = HesitantConsumer
    before = resident("VmRSS")
    seen, largest = 0, 0
    for batch in reading.read_ranges(options, schema, [OffsetRange(topic, 0, 0, rows)]):
        seen += batch.num_rows
        largest = max(largest, batch.nbytes)
    report = {"rows": seen, "largest": largest, "grown": resident("VmHWM") - before}
    print(json.dumps(report))  # noqa: T201 - a child's report


def resident(what: str) -> int:
    """Return the bytes the process has now (VmRSS) or had at most (VmHWM). `getrusage` would tell its parent's peak."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(what))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3]))
