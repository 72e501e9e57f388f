"""Retry topics: an exhausted message waits in a topic, and its offset no longer holds the watermark.

There is a topic for each delay. So the first message of a partition is due first, and no message waits behind one with
a longer delay. Headers carry the number of rounds, the retry time, the origin and the number of tries. Any client with
permission to write to the topic can forge them, so every field is checked and clamped. A forged time cannot park a
message longer than the topic's delay, and a forged count cannot give it more rounds.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

from penstock.clients.cluster import Clock
from penstock.dead_letters.headers import RETRY_PREFIX, HeaderList, own_headers
from penstock.message import FixedRecord, Record, headers_of, position_of, readable_headers, timestamp_of

_log = logging.getLogger(__name__)

ROUND = f"{RETRY_PREFIX}round"
DUE = f"{RETRY_PREFIX}due-ms"
ORIGIN = f"{RETRY_PREFIX}origin"
TRIES = f"{RETRY_PREFIX}tries"

_DIGITS = re.compile(rb"[0-9]{1,15}")
_TRIES = re.compile(rb"[0-9]{1,9}")
_DELAY = re.compile(r"([0-9]{1,9})(ms|s)")
_PER_SECOND = {"s": 1, "ms": 1000}
#: The name of a retry topic of any group.
_RETRY_TOPIC = re.compile(rf"retry\..+\..+\.{_DELAY.pattern}")
#: Topic, partition, offset and the timestamp in milliseconds, -1 for none. Older versions wrote no timestamp.
_ORIGIN = re.compile(rb"([a-zA-Z0-9._-]{1,249})/([0-9]{1,9})/([0-9]{1,18})(?:/(-1|[0-9]{1,19}))?")


def retry_topic(group: str, topic: str, delay: float) -> str:
    """Return the name of a topic's retry topic for a delay in seconds: `retry.sms.orders.60s`, or `.500ms`.

    It contains the group, because each group retries only its own messages.
    """
    seconds, left_ms = divmod(max(1, round(delay * 1000)), 1000)
    text = f"{seconds * 1000 + left_ms}ms" if left_ms else f"{seconds}s"
    return f"retry.{group}.{topic}.{text}"


def retry_topics(group: str, topic: str, delays: Iterable[float]) -> dict[str, float]:
    """Return the retry topics of a topic, each with its delay in seconds."""
    return {retry_topic(group, topic, delay): delay for delay in delays}


def is_retry_topic(topic: str) -> bool:
    """Return whether a topic has the name of a retry topic of any group."""
    return _RETRY_TOPIC.fullmatch(topic) is not None


def former_retry_topics(group: str, topic: str, existing: Iterable[str]) -> dict[str, float]:
    """Return the existing retry topics of a topic, each with its delay in seconds.

    Messages may still wait for a delay that the handler no longer has.
    """
    found = {}
    for name in existing:
        delay = _DELAY.fullmatch(name.removeprefix(f"retry.{group}.{topic}."))
        if delay is not None and delay[0] != name:
            found[name] = int(delay[1]) / _PER_SECOND[delay[2]]
    return found


def first_place(record: Record, source: str) -> tuple[str, int, int, int | None]:
    """Return the first topic, partition, offset and timestamp of a record; its own without a valid origin header.

    The record is as it was fetched, from its own topic `source` or from a retry topic.
    """
    # In its own topic the header is ignored: a record that was replayed from the dead letters may still have it.
    found = None if record.topic() == source else _ORIGIN.fullmatch(_last(record, ORIGIN) or b"")
    timestamp = timestamp_of(record)
    if found is None or found[1] != source.encode():
        return record.topic(), record.partition(), record.offset(), timestamp
    if found[4] is not None:
        timestamp = None if found[4] == b"-1" else int(found[4])
    return source, int(found[2]), int(found[3]), timestamp


@dataclass(frozen=True, slots=True)
class RetriedRecord(FixedRecord):
    """A record of a retry topic as its handler sees it: with its first topic, partition, offset and timestamp.

    So its identity is the same at every try.
    """

    fetched: Record = field(repr=False)

    @classmethod
    def of(cls, fetched: Record, source: str) -> RetriedRecord:
        """Return the handler's view of a record that comes from the topic `source`."""
        topic, partition, offset, timestamp = first_place(fetched, source)
        return cls(topic, partition, offset, fetched.key(), fetched.value(), (), timestamp, fetched)

    def headers(self) -> list[tuple[str, bytes | None]] | None:
        """Headers in wire order, or None if there are none. Read at each call, because they may be unreadable."""
        return headers_of(self.fetched)


def tries_before(record: Record, source: str) -> int:
    """Return how often a record was tried before it came to the retry topic; 0 if its header is not valid."""
    tries = None if record.topic() == source else _last(record, TRIES)
    return int(tries) if tries is not None and _TRIES.fullmatch(tries) else 0


def headers(record: Record, source: str, rounds: int, due: float, attempts: int) -> HeaderList:
    """Return the headers of a message for a retry topic.

    `rounds` counts its stays in retry topics, this one included. `due` is its retry time in seconds since the epoch.
    It was tried `attempts` times since it was fetched.
    """
    topic, partition, offset, time = first_place(record, source)
    return [
        *own_headers(record),
        (ROUND, str(rounds)),
        (DUE, str(int(due * 1000))),
        (ORIGIN, f"{topic}/{partition}/{offset}/{-1 if time is None else time}"),
        (TRIES, str(tries_before(record, source) + attempts)),
    ]


class RetryHeaders:
    """Reads the headers of messages in a retry topic. Thread-safe, because it is stateless.

    The topic's `delay` in seconds and the number of the handler's `rounds` bound the claims of headers.
    """

    def __init__(self, delay: float, rounds: int, clock: Clock) -> None:
        self._delay = delay
        self._rounds = rounds
        self._clock = clock

    def rounds(self, record: Record) -> int:
        """Return the number of rounds of a message; the last round if its header is not valid."""
        found = _number(record, ROUND)
        return self._rounds if found is None else min(max(1, found), self._rounds)

    def due_at(self, record: Record) -> float:
        """Return the retry time of a message, on the monotonic clock; a time in the past if its header has none."""
        due = _number(record, DUE)
        wait = 0.0 if due is None else min(due / 1000 - self._clock.time(), self._delay)
        return self._clock.monotonic() + wait if wait > 0 else 0.0


def _number(record: Record, name: str) -> int | None:
    found = _last(record, name)
    if found is not None and _DIGITS.fullmatch(found):
        return int(found)
    _log.warning(
        "%s carries no readable %s; it was not written by penstock, and is handled as due and in its last round",
        position_of(record),
        name,
    )
    return None


def _last(record: Record, name: str) -> bytes | None:
    """Return the last header with a name, or None; also None if the client cannot read the headers."""
    return dict(readable_headers(record)).get(name)
