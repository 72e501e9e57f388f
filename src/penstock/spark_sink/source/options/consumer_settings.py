"""The settings of consumers that are given their partitions by hand: they join no group, and find ends by position."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.options import ClientConfig

#: The library wants a group's name all the same.
GROUP = "penstock-spark"

#: Client settings that only mean something to a member of a consumer group, by prefix.
_OF_A_MEMBER = (
    "auto.",
    "enable.auto.",
    "group.",
    "heartbeat.",
    "max.poll.",
    "on_commit",
    "partition.assignment.",
    "session.",
)


def assigned_consumer(config: ClientConfig, **given: object) -> dict[str, Any]:
    """Return the settings of such a consumer: those given, with `_` for dots, count before the user's."""
    return {
        # An empty answer tells the end of a partition: the broker shall not hold it back for half a second.
        "fetch.wait.max.ms": 20,
        "fetch.queue.backoff.ms": 5,
        "group.id": GROUP,
        **config,
        "enable.auto.commit": False,
        "enable.auto.offset.store": False,
        "enable.partition.eof": True,
        # Offsets that are gone must be named, never jumped over.
        "auto.offset.reset": "error",
        **{name.replace("_", "."): value for name, value in given.items()},
    }


def without_group(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return client settings without those of a member of a consumer group."""
    return {key: value for key, value in config.items() if not key.startswith(_OF_A_MEMBER)}
