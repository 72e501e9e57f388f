"""The lane of each row as Spark computes it by itself, without a step through Python.

What waits for each other has one lane, as `Ordering` says of identities; which number it is means nothing, and need not
be the consumer's. Where handlers have key functions, `task.routing` calls them.
"""

from __future__ import annotations

from collections.abc import Mapping

from pyspark.sql import Column
from pyspark.sql import functions as F  # noqa: N812 - the name under which everybody knows it

from penstock.consumer.handlers.handler import Handler, SpaceNumbers, space_of
from penstock.consumer.handlers.options.ordering import Keyless, Order
from penstock.spark_sink.sinks.position import POSITION


def has_order(handlers: Mapping[str, Handler]) -> bool:
    """Tell whether any of the handlers' messages wait for each other."""
    return any(one.order is not Order.NONE for one in handlers.values())


def needs_keys(handlers: Mapping[str, Handler]) -> bool:
    """Tell whether any of the handlers' messages wait for others of their key, which may be read by another task."""
    return any(one.order is Order.KEY for one in handlers.values())


def lane_column(handlers: Mapping[str, Handler], lanes: int) -> Column:
    """Return the lane of each row, for handlers without key functions. Rows of other topics have any."""
    numbers: SpaceNumbers = {}
    kinds = {
        topic: (one.order, one.keyless, space_of(one, numbers) if one.order is Order.KEY else 0)
        for topic, one in handlers.items()
    }
    first, *others = dict.fromkeys(kinds.values())
    hashed = _hash(*first)
    for kind in others:
        topics = [topic for topic, its in kinds.items() if its == kind]
        hashed = F.when(F.col("topic").isin(topics), _hash(*kind)).otherwise(hashed)
    return F.pmod(hashed, F.lit(lanes)).cast("int")


def _hash(order: Order, keyless: Keyless, space: int) -> Column:
    by_place, by_partition = F.xxhash64(*POSITION), F.xxhash64("topic", "partition")
    if order is not Order.KEY:
        return by_partition if order is Order.PARTITION else by_place
    by_key = F.xxhash64(F.lit(space), F.col("key"))
    if keyless is Keyless.TOGETHER:
        return by_key  # of all NULLs it is the same
    return F.when(F.col("key").isNotNull(), by_key).otherwise(
        by_partition if keyless is Keyless.PARTITION else by_place
    )
