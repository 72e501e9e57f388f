"""Reports of queries, and what is read from them."""

from __future__ import annotations

from penstock.spark_sink.source.offsets.planning import Offsets
from telemetry_tools import Recorded


class Ledger:
    """A sink that tells its ledger."""

    def __init__(self, topic: str = "orders", offset: int = 3) -> None:
        self.asked = 0
        self._ledger = {(topic, 0): offset}

    def position(self, _query: str) -> Offsets:
        self.asked += 1
        if self.asked == 1:
            raise ConnectionError("secret-of-the-url")
        return self._ledger


def values(recorded: Recorded, name: str) -> dict[tuple[str, ...], float]:
    """Return a metric's values by topic and partition, and see that each names its query."""
    found = {}
    for point in recorded.points(name):
        assert point.attributes["penstock.spark.query"] == "store"
        place = [point.attributes.get(f"messaging.destination.{part}") for part in ("name", "partition.id")]
        found[tuple(one for one in place if one is not None)] = getattr(point, "value", 0)
    return found
