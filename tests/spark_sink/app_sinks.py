"""What tests of apps with sinks need."""

from __future__ import annotations

from collections.abc import Callable

NewTopic = Callable[..., str]


#: Seconds that Spark may take for some batches on a machine that has other things to do.
SPARK_S = 150.0
