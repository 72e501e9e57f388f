"""The settings of consumers that are given their partitions by hand: they join no group, and find ends by position."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.options import ClientConfig

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


def reading_settings(
    config: ClientConfig, group: str, isolation: str = "read_committed", given: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the settings of such a consumer.

    Args:
        config: the user's; left out is what only a member of a group takes, and a callback for his own clients.
        group: what the client library wants a name for; it is only asked about.
        isolation: `read_committed` or `read_uncommitted`.
        given: what counts before the user's and ours.
    """
    return {
        **{name: value for name, value in without_membership(config).items() if name != "stats_cb"},
        "group.id": group,
        "isolation.level": isolation,
        "enable.auto.commit": False,
        "enable.auto.offset.store": False,
        "enable.partition.eof": True,
        "auto.offset.reset": "earliest",
        # An empty answer tells the end of a partition: the broker shall not hold it back for half a second.
        "fetch.wait.max.ms": 20,
        "fetch.queue.backoff.ms": 5,
        **(given or {}),
    }


def without_membership(config: ClientConfig) -> dict[str, Any]:
    """Return client settings without those of a member of a consumer group."""
    return {key: value for key, value in config.items() if not key.startswith(_OF_A_MEMBER)}
