"""The reporter: publishes the state of a process every few seconds, on its own thread and with its own producer.

If a report takes long to make, for example with very many partitions, the interval grows: reports never cost more than
a small share of one core.
"""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from functools import partial

from penstock.clients.rights import Operation
from penstock.clients.topics import TopicSpec
from penstock.description import process_of_coordinator
from penstock.errors import PenstockError
from penstock.fleet.reports.report import ReportMaker
from penstock.fleet.topics import RecordWriter, TopicService, make_topics, stamped_topic
from penstock.fleet_member import MOST_INTERVAL_S, Describe, ReportSettings, Sender, sender_of
from penstock.options import ClientConfig
from penstock.transactions import Coordinator

_log = logging.getLogger(__name__)

#: The share of its thread's time that reports may cost.
_SHARE = 0.005
#: The timeout in seconds of the last record, a tombstone that removes the member.
_LAST_RECORD_S = 2.0


def topic_spec(name: str) -> TopicSpec:
    """Return the specification of the topic: it keeps the last report of each member, for a day.

    Segments are small, because only closed ones are compacted: a new reader reads few records.
    """
    compacted = {
        "cleanup.policy": "compact,delete",
        "segment.bytes": str(4 << 20),
        "min.cleanable.dirty.ratio": "0.01",
        "delete.retention.ms": str(10 * 60 * 1000),
    }
    return stamped_topic(name, 24 * 3600 * 1000, compacted)


class Reporter(TopicService):
    """Reports until it is stopped. Call `start` and `stop` from one thread.

    Args:
        sender: the names of the process.
        describe: returns the description; called on the reporter's thread.
    """

    def __init__(
        self,
        sender: Sender,
        describe: Describe,
        bootstrap_servers: str,
        config: ClientConfig,
        settings: ReportSettings,
    ) -> None:
        failing = f"{sender.group} does not report to {settings.topic}, so `penstock status` does not show it"
        super().__init__(f"penstock-report-{sender.group}", failing, _LAST_RECORD_S)
        self.sender = sender
        self._describe = describe
        self._bootstrap_servers = bootstrap_servers
        self._config = config
        self._settings = settings
        # Only the reporter's thread uses the fields below. Delivery callbacks run on it, too.
        self._reports = ReportMaker(sender, time.monotonic())
        self._cost_s = 0.0

    def _work(self) -> None:
        make_topics(self._bootstrap_servers, self._config, [(topic_spec(self._settings.topic), Operation.WRITE)])
        writer = RecordWriter(self._bootstrap_servers, self._config)
        self.is_listening.set()
        while not self._stopping.is_set():
            interval_s = self._report(writer)
            self._works()
            self._stopping.wait(interval_s)
        try:
            writer.write(self._settings.topic, None, self.sender.key, _LAST_RECORD_S)
        except PenstockError as error:
            _log.info("%s was not removed from %s: %s", self.sender.member, self._settings.topic, error)

    def _report(self, writer: RecordWriter) -> float:
        """Write a report; return the seconds until the next."""
        begun_s = time.thread_time()
        # The interval depends on the cost of the previous report.
        value = self._reports.next_report(self._describe(), self._interval_s, time.monotonic())
        writer.write(self._settings.topic, value, self.sender.key)
        self._cost_s = time.thread_time() - begun_s
        return self._interval_s

    @property
    def _interval_s(self) -> float:
        return min(MOST_INTERVAL_S, max(self._settings.interval, self._cost_s / _SHARE))


def coordinator_reporter(
    coordinator: Coordinator,
    bootstrap_servers: str,
    config: ClientConfig,
    settings: ReportSettings | None = None,
) -> Reporter:
    """Return the reporter, not started, of a coordinator that runs outside an app."""
    sender = replace(sender_of(coordinator.group, config), member=coordinator.member)
    describe = partial(process_of_coordinator, coordinator)
    return Reporter(sender, describe, bootstrap_servers, config, settings or ReportSettings())
