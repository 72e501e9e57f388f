"""Where the half, op and done logs begin and end, and which topics they are.

What is in an answer was true at some time after the question: that is what makes an end that was asked for worth more
than one that a fetch brought along.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from confluent_kafka import IsolationLevel
from confluent_kafka.admin import AdminClient

from penstock.clients.kafka_errors import reason
from penstock.clients.requests.log_ends import FIRST, LAST, ask_offsets
from penstock.clients.requests.topic_ids import ask_topic_ids
from penstock.transactions.stores.kafka.logs.log_identity import DONE, HALF, OP
from penstock.transactions.wire.topics import StoreTopics

#: Seconds that a broker may take to answer.
ANSWER_S = 5.0


class Bounds(NamedTuple):
    """Where a log begins and ends."""

    low: int
    end: int


@dataclass(frozen=True, slots=True)
class Look:
    """What the brokers answered.

    Attributes:
        asked_at: when they were asked, in monotonic seconds.
        bounds: by log and half partition; what was not answered is not there.
        ids: topic ids by log.
        failures: why something is not there, by what was asked.
    """

    asked_at: float
    bounds: Mapping[tuple[str, int], Bounds]
    ids: Mapping[str, str]
    failures: Mapping[str, str]


def look_at_logs(admin: AdminClient, topics: StoreTopics, partitions: Iterable[int]) -> Look:
    """Return the bounds and ids of the logs of half partitions, waiting for the answers.

    Raises `KafkaException` where the client library refuses to ask.
    """
    logs = {topics.half: HALF, topics.op: OP, topics.done: DONE}
    asked_at, numbers = time.monotonic(), list(partitions)
    places = [(topic, number) for topic in logs for number in numbers]
    asked = [
        ask_offsets(admin, dict.fromkeys(places, spec), ANSWER_S, IsolationLevel.READ_UNCOMMITTED)
        for spec in (FIRST, LAST)
    ]
    found = ask_topic_ids(admin, logs, ANSWER_S).wait()
    (lows, no_lows), (ends, no_ends) = (offsets.wait() for offsets in asked)
    bounds = {
        (logs[topic], number): Bounds(low, ends[topic, number])
        for (topic, number), low in lows.items()
        if (topic, number) in ends
    }
    failures = {f"{topic}[{number}]": reason(why) for (topic, number), why in {**no_lows, **no_ends}.items()}
    ids = {logs[name]: topic_id for name, topic_id in found.ids.items()}
    return Look(asked_at, bounds, ids, {**failures, **found.failures})


def topic_ids(admin: AdminClient, topics: StoreTopics) -> dict[str, str]:
    """Return the ids of half, op and done by log, waiting for the answer; without those that have none."""
    logs = {topics.half: HALF, topics.op: OP, topics.done: DONE}
    return {logs[name]: topic_id for name, topic_id in ask_topic_ids(admin, logs, ANSWER_S).wait().ids.items()}
