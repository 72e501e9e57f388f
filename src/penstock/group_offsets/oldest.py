"""The oldest message of each partition that is not done: finds it by reading one record."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import cast

from confluent_kafka import KafkaError

from penstock.clients.kafka_errors import ErrorKind, reason
from penstock.clients.reading import PartitionReader
from penstock.clients.rights import Operation, missing_right_text, principal_of, topic_right
from penstock.group_offsets.positions import Part, Position
from penstock.message import Record, timestamp_of
from penstock.options import ClientConfig
from penstock.places import place_text

_POLL_S = 0.5


@dataclass(frozen=True, slots=True)
class Oldest:
    """A message that is not done."""

    offset: int
    #: Its timestamp, milliseconds since 1970, by the producer's or the broker's clock; None without one.
    timestamp_ms: int | None

    def age_s(self, now_s: float) -> float | None:
        """Return its age in seconds at `now_s`, seconds since 1970; None without a timestamp."""
        return None if self.timestamp_ms is None else max(0.0, now_s - self.timestamp_ms / 1000)


def oldest_not_done(
    bootstrap_servers: str, config: ClientConfig, group: str, positions: Iterable[Position], limit_s: float
) -> tuple[dict[Part, Oldest], list[str]]:
    """Read the first record that is not done of each partition with messages left. Joins no group, commits nothing.

    Because of transaction markers and compaction an offset may have no record. So it reads from the committed offset on
    to the first record that the offset map does not have as done.

    Returns the messages by partition, without partitions that have only uncommitted records; and sentences about
    partitions whose message is unknown. After `limit_s` seconds the missing ones are unknown. `ConfigurationError` if
    the client library refused a setting.
    """
    left = {position.part: position for position in positions if position.left}
    found: dict[Part, Oldest] = {}
    failures: set[str] = set()

    def failed(kind: ErrorKind, error: KafkaError, part: Part) -> None:
        text = _why_unknown(kind, error, part, config)
        if text is not None and left.pop(part, None) is not None:
            failures.add(text)

    if not left:
        return {}, []
    isolation = config.get("isolation.level", "read_committed")
    # Small fetches, because one record of each partition is enough. The reader does not join the group: the client
    # library requires a name, and this user has permissions on this group.
    small = {"queued.min.messages": 1, "fetch.message.max.bytes": 65_536}
    with PartitionReader(bootstrap_servers, config, group, failed, isolation=isolation, given=small) as reader:
        reader.start({part: max(position.committed or 0, position.log.start) for part, position in left.items()})
        deadline = time.monotonic() + limit_s
        while left and (rest := deadline - time.monotonic()) > 0:
            before = set(left)
            for message in reader.poll(min(rest, _POLL_S), 100):
                part, offset = (message.topic() or "", message.partition() or 0), message.offset() or 0
                if part in left and not left[part].is_done(offset):
                    found[part] = Oldest(offset, timestamp_of(cast("Record", message)))
                    del left[part]
            for part in reader.exhausted & left.keys():  # it has only uncommitted records
                del left[part]
            reader.pause(before - left.keys())
    if left:
        late = ", ".join(place_text(*part) for part in sorted(left))
        failures.add(f"no record of {late} arrived within {limit_s:g} s, so its age is unknown")
    return found, sorted(failures)


def _why_unknown(kind: ErrorKind, error: KafkaError, part: Part, config: ClientConfig) -> str | None:
    """Return the reason why the age of a partition's messages is unknown; None for a transient error."""
    if kind is ErrorKind.MISSING_RIGHT:
        what, right = f"the age of messages of {part[0]} is unknown", topic_right(Operation.READ, part[0])
        return missing_right_text(what, [right], principal_of(config))
    if kind is ErrorKind.FATAL:
        return f"{place_text(*part)} cannot be read: {reason(error)}; so its age is unknown"
    return None
