"""What the coordinators of a store in Kafka tell of themselves: which targets take nothing now, which call hangs.

Whoever looks into a store reads its topics and knows no coordinator, so the reasons for which something waits have a
topic of their own: `<prefix>.status`, one partition, kept for an hour. A record is all that one coordinator has to
tell; the latest of each counts, as long as it is not old. The topic is for people who look: nothing is decided by it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from types import MappingProxyType
from typing import Any

from confluent_kafka import KafkaError, KafkaException, Message

from penstock.clients.kafka_errors import is_missing_right, reason
from penstock.clients.rights import Operation, topic_right
from penstock.clients.transactional.missing_rights import MissingRights
from penstock.errors import MessageFormatError
from penstock.transactions.wire.topics import StoreTopics
from penstock.transactions.writing.acked_producer import AckedProducer

_log = logging.getLogger("penstock.transactions")

#: Seconds between two records at least, and until what has not changed is written again.
_LEAST_S = 1.0
_AGAIN_S = 20.0
#: Seconds after which a record counts no more: its coordinator is gone, or cannot write.
STALE_S = 90.0

#: How much of it is written. What is longer or more is cut; a record that is larger than all of it is no status.
MOST_NAMED = 100
_MOST_CHARACTERS = 700
_MOST_PARTITIONS = 10_000
_MOST_BYTES = 512 << 10
_MOST_NUMBER = 1 << 53

_VERSION = 1
#: What a status says in words, by what it is about.
_REASONS = ("targets", "refused", "refusing", "rights", "unasked")
_NOTHING: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class Status:
    """What hinders one coordinator, as it writes it down.

    Attributes:
        coordinator: its name; no two that run at the same time share one.
        at_ms: when, in milliseconds since the epoch.
        partitions: the half partitions that it owns or recovers.
        slow_call: name of a call into the Kafka client that has not returned for long; empty where there is none.
        slow_call_s: for how many seconds it had not returned at `at_ms`.
        left_behind: threads that hang in calls that never returned.
        targets: topics that take nothing now, each with the broker's reason.
        refused: ids of transactions that their target refused, each with the broker's reason; at most 100.
        refusing: where there are more of them, the targets that refused them, each with a reason.
        rights: rights that it lacks for what is its own, each with what is refused and what gives it.
        unasked: producer groups that could not be asked, each with what its undecided transactions wait for.
    """

    coordinator: str
    at_ms: int
    partitions: tuple[int, ...] = ()
    slow_call: str = ""
    slow_call_s: float = 0.0
    left_behind: int = 0
    targets: Mapping[str, str] = field(default_factory=lambda: _NOTHING)
    refused: Mapping[str, str] = field(default_factory=lambda: _NOTHING)
    refusing: Mapping[str, str] = field(default_factory=lambda: _NOTHING)
    rights: Mapping[str, str] = field(default_factory=lambda: _NOTHING)
    unasked: Mapping[str, str] = field(default_factory=lambda: _NOTHING)

    @property
    def is_notable(self) -> bool:
        """Whether anything is the matter."""
        reasons = self.targets or self.refused or self.rights or self.unasked
        return bool(self.slow_call or self.left_behind or reasons)


def encode_status(status: Status) -> bytes:
    """Return the value of a record; its key is the coordinator's name."""
    return json.dumps(
        {
            "version": _VERSION,
            "coordinator": _cut(status.coordinator),
            "at_ms": status.at_ms,
            "partitions": list(status.partitions[:_MOST_PARTITIONS]),
            "slow_call": _cut(status.slow_call),
            "slow_call_s": round(status.slow_call_s, 1),
            "left_behind": status.left_behind,
            **{name: _bounded(getattr(status, name)) for name in _REASONS},
        }
    ).encode()


def decode_status(value: bytes | None) -> Status:
    """Read the value of a record; what is something else raises `MessageFormatError`."""
    try:
        return _read(value or b"")
    # json raises RecursionError for what is nested without end.
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise MessageFormatError(
            f"a status record that does not read ({type(error).__name__}); it is passed over"
        ) from error


def _read(value: bytes) -> Status:
    if len(value) > _MOST_BYTES:
        raise ValueError("it is too large")
    fields = json.loads(value)
    partitions = fields["partitions"]
    if fields["version"] != _VERSION or not isinstance(partitions, list) or len(partitions) > _MOST_PARTITIONS:
        raise ValueError("it is of another version, or its partitions cannot be")
    return Status(
        _text(fields["coordinator"]),
        int(_number(fields["at_ms"])),
        tuple(int(_number(number)) for number in partitions),
        _text(fields["slow_call"]),
        float(_number(fields["slow_call_s"])),
        int(_number(fields["left_behind"])),
        # Earlier versions do not tell all of them.
        **{name: _texts(fields.get(name, {})) for name in _REASONS},
    )


def _bounded(reasons: Mapping[str, str]) -> dict[str, str]:
    return {_cut(name): _cut(why) for name, why in islice(reasons.items(), MOST_NAMED)}


def _cut(text: str) -> str:
    return text[:_MOST_CHARACTERS]


def _text(value: object) -> str:
    if not isinstance(value, str) or len(value) > _MOST_CHARACTERS:
        raise TypeError("no text, or too long")
    return value


def _number(value: object) -> int | float:
    # NaN is not below anything either.
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < _MOST_NUMBER:
        raise TypeError("no number, or out of its range")
    return value


def _texts(value: Any) -> Mapping[str, str]:
    if not isinstance(value, dict) or len(value) > MOST_NAMED:
        raise TypeError("no mapping, or too large")
    return {_text(name): _text(why) for name, why in value.items()}


class StatusLog:
    """Writes the status of one coordinator. Used by its thread, which never waits here, and gets no exception."""

    def __init__(self, sends: AckedProducer, topics: StoreTopics, rights: MissingRights) -> None:
        self._sends = sends
        self._rights = rights
        self._topic = topics.status
        # What was written last, less what changes by itself; None: nothing, or that nothing is the matter.
        self._last: Status | None = None
        self._tried_at = -_AGAIN_S
        self._last_at = -_AGAIN_S
        self._is_refused = False

    def write(self, status: Status, now: float) -> None:
        """Write a status down if it is new, or if the last record grows old; `now` is in monotonic seconds."""
        news = replace(status, at_ms=0, slow_call_s=0.0) if status.is_notable else None
        is_due = news != self._last or (news is not None and now - self._last_at >= _AGAIN_S)
        if not is_due or now - self._tried_at < _LEAST_S:
            return
        self._tried_at = now
        try:
            key, value = status.coordinator.encode(), encode_status(status)
            is_sent = self._sends.try_send(self._topic, 0, key, value, report=self._reported)
        except KafkaException as error:
            if is_missing_right(error):
                self._report_lacking()
                return
            # Without it less is shown, and nothing else is wrong.
            if not self._is_refused:
                self._is_refused = True
                _log.warning("%s takes nothing, so `penstock tx ls` shows less: %s", self._topic, reason(error))
            return
        if is_sent:
            self._last, self._last_at = news, now

    def _reported(self, error: KafkaError | None, _: Message) -> None:
        """Take the report on a record, in the delivery thread."""
        if error is None:
            self._rights.granted(topic_right(Operation.WRITE, self._topic))
        elif is_missing_right(error):
            self._report_lacking()

    def _report_lacking(self) -> None:
        what = f"{self._topic} takes nothing, so that `penstock tx ls` shows less"
        self._rights.refused(what, topic_right(Operation.WRITE, self._topic))
