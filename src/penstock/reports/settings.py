"""What an app says about its reports, and the topic that they are in."""

from __future__ import annotations

from dataclasses import dataclass

from penstock import options as check
from penstock.clients.requests.topics import TopicSpec
from penstock.errors import ConfigurationError
from penstock.reports.report import MOST_INTERVAL_S

#: Not `penstock.status`: that is the topic of a transaction store with the prefix `penstock`, kept for an hour.
DEFAULT_TOPIC = "penstock.reports"


@dataclass(frozen=True, slots=True)
class ReportSettings:
    """How a member reports, where `App(report=True)` is not enough.

    Args:
        topic: name of the topic; created when absent. All whose state is to be seen together share it.
        interval: seconds between two reports; they come less often where making one takes over 0.5 % of that.
        stacks: whether the stack of a handler that holds a partition is in them; it shows the names of your code.

    Raises:
        ConfigurationError: an option is wrong.
    """

    topic: str = DEFAULT_TOPIC
    interval: float = 2.0
    stacks: bool = False

    def __post_init__(self) -> None:
        check.not_empty("topic", self.topic)
        check.positive("interval", self.interval)
        if self.interval > MOST_INTERVAL_S:
            raise ConfigurationError(f"interval must be {MOST_INTERVAL_S:g} s at most, but is {self.interval:g}")


def report_settings(given: bool | ReportSettings) -> ReportSettings | None:
    """Return the settings that a user gave as `report`, or None for none; `ConfigurationError` where it is neither."""
    return check.switched("report", given, ReportSettings)


def topic_spec(name: str) -> TopicSpec:
    """Return the topic as it is created: the last report of each member, and silent ones for a day.

    Small segments, for only closed ones are compacted: whoever begins to read reads a few of them.
    """
    return TopicSpec(
        name,
        1,
        {
            "cleanup.policy": "compact,delete",
            "retention.ms": str(24 * 3600 * 1000),
            "segment.bytes": str(4 << 20),
            "min.cleanable.dirty.ratio": "0.01",
            "delete.retention.ms": str(10 * 60 * 1000),
            "message.timestamp.type": "LogAppendTime",
        },
    )
