"""The reporter: publishes what a process tells of itself every few seconds, on a thread and with a producer of its own.

Where making a report takes long, as with very many partitions, reports come less often, so that they never cost more
than a small share of one core.
"""

from __future__ import annotations

import heapq
import logging
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from operator import itemgetter
from typing import Any

from penstock import clients
from penstock.clients.rights import Operation, principal_of
from penstock.clients.topics import TopicSpec, ensure_topics
from penstock.description import coordinator_description
from penstock.errors import PenstockError
from penstock.fleet.reports.report import Rates, encode_report, key_hash
from penstock.fleet.service import TopicService
from penstock.fleet.topics import RecordWriter
from penstock.fleet_member import MOST_INTERVAL_S, Describe, ReportSettings, Sender, Stacks, sender_of
from penstock.options import ClientConfig
from penstock.transactions import Coordinator

_log = logging.getLogger(__name__)

#: The share of its thread's time that making reports may take.
_SHARE = 0.005
#: Seconds that the last record, which takes the member out, may take.
_LAST_RECORD_BUDGET_S = 2.0
_MIN_LAST_RECORD_BUDGET_S = 0.5
#: Stacks in one report.
_MOST_STACKS = 4


def _no_stacks(_workers: Iterable[str]) -> Mapping[str, str]:
    return {}


def hashed(description: Mapping[str, Any], group: str) -> dict[str, Any]:
    """Return a description with the hashes of keys instead of the keys."""
    made = dict(description)
    for part in ("partitions", "parked"):
        made[part] = [
            {**entry, "key": None, "key_hash": key_hash(entry.get("key"), group)} for entry in made.get(part, ())
        ]
    return made


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


class Reporter(TopicService):
    """Reports until it is stopped. `start` and `stop` are for one thread.

    Args:
        sender: as whom it reports.
        describe: returns the description; called on the reporter's thread.
        bootstrap_servers: addresses of the brokers.
        config: client settings by librdkafka's names.
        settings: the options.
        stacks: returns stacks of handlers, where the options ask for them.
    """

    def __init__(
        self,
        sender: Sender,
        describe: Describe,
        bootstrap_servers: str,
        config: ClientConfig,
        settings: ReportSettings,
        *,
        stacks: Stacks = _no_stacks,
    ) -> None:
        super().__init__(f"penstock-report-{sender.group}")
        self.sender = sender
        self._describe = describe
        self._bootstrap_servers = bootstrap_servers
        self._config = config
        self._settings = settings
        self._stacks = stacks
        # Written by `stop` before the thread is to end.
        self._end_s = _LAST_RECORD_BUDGET_S
        # All below: the reporter's thread's alone, where delivery callbacks are called, too.
        self._started = time.monotonic()
        self._sequence = 0
        self._rates = Rates()
        self._cost_s = 0.0

    def stop(self, left_s: float = _LAST_RECORD_BUDGET_S) -> None:
        """Take the member out of the topic and end, within `left_s` seconds or the little that it takes."""
        self._end_s = min(_LAST_RECORD_BUDGET_S, max(_MIN_LAST_RECORD_BUDGET_S, left_s))
        super().stop(self._end_s + _MIN_LAST_RECORD_BUDGET_S)

    def _work(self) -> None:
        writer = self._connect()
        self.is_listening.set()
        while not self._stopping.is_set():
            interval_s = self._report(writer)
            self._works()
            self._stopping.wait(interval_s)
        try:
            writer.write(self._settings.topic, None, self.sender.key, self._end_s)
        except PenstockError as error:
            _log.info("%s was not taken out of %s: %s", self.sender.member, self._settings.topic, error)

    def _connect(self) -> RecordWriter:
        topic = self._settings.topic
        ensure_topics(
            clients.admin(self._bootstrap_servers, self._config),
            self._bootstrap_servers,
            [topic_spec(topic)],
            needs={topic: (Operation.WRITE,)},
            principal=principal_of(self._config),
        )
        return RecordWriter(self._bootstrap_servers, self._config)

    def _report(self, writer: RecordWriter) -> float:
        """Write a report; return the seconds until the next."""
        begun_s = time.thread_time()
        description = hashed(self._describe(), self.sender.group)
        if self._settings.stacks:
            self._add_stacks(description["partitions"])
        rates = self._rates.of(description, time.monotonic())
        self._sequence += 1
        # What this one takes is known at its end: the next pays for it.
        numbers = {
            "sequence": self._sequence,
            "interval_s": round(self._interval_s, 3),
            "uptime_s": round(time.monotonic() - self._started, 1),
        }
        value = encode_report(self.sender, description, rates, numbers)
        writer.write(self._settings.topic, value, self.sender.key)
        self._cost_s = time.thread_time() - begun_s
        return self._interval_s

    @property
    def _interval_s(self) -> float:
        return min(MOST_INTERVAL_S, max(self._settings.interval, self._cost_s / _SHARE))

    def _add_stacks(self, partitions: Iterable[dict[str, Any]]) -> None:
        """Add the stacks of the handlers that have held a partition for longer than between two reports."""
        held = [
            partition
            for partition in partitions
            if partition.get("worker") and (partition.get("age") or 0) > self._settings.interval
        ]
        held = heapq.nlargest(_MOST_STACKS, held, key=itemgetter("age"))
        stacks = self._stacks([partition["worker"] for partition in held]) if held else {}
        for partition in held:
            partition["stack"] = stacks.get(partition["worker"]) or None

    def _say_failed(self, why: str) -> None:
        _log.warning(
            "%s does not report to %s, so `penstock status` does not show it; it is tried on: %s",
            self.sender.group,
            self._settings.topic,
            why,
        )


def coordinator_reporter(
    group: str,
    coordinator: Coordinator,
    bootstrap_servers: str,
    config: ClientConfig,
    settings: ReportSettings | None = None,
) -> Reporter:
    """Return what reports a coordinator that is no app's, not started yet, under the name of a group."""

    def describe() -> Mapping[str, Any]:
        return {"coordinator": coordinator_description(coordinator)}

    sender = sender_of(group, config)
    if group == coordinator.group:
        sender = replace(sender, member=coordinator.member)
    return Reporter(sender, describe, bootstrap_servers, config, settings or ReportSettings())
