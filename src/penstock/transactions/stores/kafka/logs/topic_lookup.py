"""What brokers say of the half, op and done topics: where the logs begin and end, their ids and their settings.

What is in an answer was true at some time after the question: that is what makes an end that was asked for worth more
than one that a fetch brought along.

Settings that would lose transactions are corrected, or refused. Retention deletes pending halves, compaction all but
the newest of a key, and with `CreateTime` the clocks of producers decide when a half is checked and a delayed message
published. Somebody may have set that, or an operator may have made the topics with the broker's defaults.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from confluent_kafka import IsolationLevel, KafkaError, KafkaException
from confluent_kafka.admin import (  # type: ignore[attr-defined] # not all in its __all__
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
)

from penstock.clients.bounded_calls import ask_again
from penstock.clients.kafka_errors import is_missing_right, reason
from penstock.clients.rights import THIS_CLIENT, Operation, lacking_text, topic_right
from penstock.clients.topics import FIRST, LAST, ask_offsets, ask_topic_ids
from penstock.errors import ConfigurationError
from penstock.transactions.stores.kafka.logs.recovered_partition import DONE, HALF, OP
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
    failures = {f"{topic}:{number}": reason(why) for (topic, number), why in {**no_lows, **no_ends}.items()}
    ids = {logs[name]: topic_id for name, topic_id in found.ids.items()}
    return Look(asked_at, bounds, ids, {**failures, **found.failures})


def topic_ids(admin: AdminClient, topics: StoreTopics) -> dict[str, str]:
    """Return the ids of half, op and done by log, waiting for the answer; without those that have none."""
    logs = {topics.half: HALF, topics.op: OP, topics.done: DONE}
    return {logs[name]: topic_id for name, topic_id in ask_topic_ids(admin, logs, ANSWER_S).wait().ids.items()}


_log = logging.getLogger("penstock.transactions")

_ANSWER_S = 10.0
#: Seconds in which a topic that was just made shall be known to all brokers.
_NEW_TOPIC_BUDGET_S = 10.0
_POLL_S = 0.1
#: What a record of the done log may take: a snapshotted transaction, or the notes of a large group.
_DONE_BYTES = 1 << 20
#: What it is raised to: as `topics` makes it.
_DONE_ROOM = str(2 << 20)


def wrong_settings(settings: Mapping[str, str | None], *, is_done: bool) -> dict[str, str]:
    """Return what must be changed in the settings of a half, op or done topic: the right values, by name. Pure.

    `settings` are those that take effect, by Kafka's names.
    """
    wanted: dict[str, str] = {}
    if "compact" in (settings.get("cleanup.policy") or ""):
        wanted["cleanup.policy"] = "delete"
    for name in ("retention.ms", "retention.bytes"):
        if settings.get(name) not in {None, "-1"}:
            wanted[name] = "-1"
    if not is_done and settings.get("message.timestamp.type") == "CreateTime":
        wanted["message.timestamp.type"] = "LogAppendTime"
    largest = settings.get("max.message.bytes") or ""
    if is_done and largest.isdigit() and int(largest) < _DONE_BYTES:
        wanted["max.message.bytes"] = _DONE_ROOM
    return wanted


def correct_settings(
    admin: AdminClient, bootstrap_servers: str, topics: StoreTopics, *, refuses: bool, principal: str = THIS_CLIENT
) -> None:
    """Look at the settings of half, op and done, which exist, and correct what is wrong, with a line in the log.

    What is wrong and cannot be corrected raises `ConfigurationError` if this `refuses` it, else it is a warning; both
    name the command that corrects it. What cannot be looked at is said in a warning, with the right that `principal`
    needs for it.
    """
    for name, settings in _described(admin, (topics.half, topics.op, topics.done), principal, is_duty=refuses).items():
        wrong = wrong_settings(settings, is_done=name == topics.done)
        if not wrong:
            continue
        was = ", ".join(f"{setting}={settings[setting]}" for setting in wrong)
        now = ", ".join(f"{setting}={right}" for setting, right in wrong.items())
        why = _corrected(admin, name, wrong)
        if why is None:
            _log.warning("topic %s had %s, which can lose transactions: it is %s now", name, was, now)
            continue
        right = topic_right(Operation.ALTER_CONFIGS, name).command(principal)
        text = (
            f"topic {name} has {was}, which can lose transactions, and that could not be changed: {why}; change it by "
            f"{_command(bootstrap_servers, name, wrong)}, or allow this client to do so by `{right}`"
        )
        if refuses:
            raise ConfigurationError(text)
        _log.warning("%s", text)


def _command(bootstrap_servers: str, topic: str, wrong: Mapping[str, str]) -> str:
    settings = ",".join(f"{name}={right}" for name, right in wrong.items())
    return (
        f"`kafka-configs.sh --bootstrap-server {bootstrap_servers} --alter --entity-type topics --entity-name {topic} "
        f"--add-config {settings}`"
    )


def _described(
    admin: AdminClient, names: tuple[str, ...], principal: str, *, is_duty: bool
) -> dict[str, dict[str, str | None]]:
    """Return the settings of topics that the broker tells; of the others it is said that they are not known.

    `is_duty` tells whether whoever asks should have the right to; a producer may leave it to the coordinator.
    """
    found: dict[str, dict[str, str | None]] = {}

    def ask() -> dict[str, KafkaException]:
        wanted = [ConfigResource(ConfigResource.Type.TOPIC, name) for name in names if name not in found]
        failures: dict[str, KafkaException] = {}
        for resource, future in admin.describe_configs(wanted, request_timeout=_ANSWER_S).items():
            try:
                found[resource.name] = {name: entry.value for name, entry in future.result().items()}
            except KafkaException as error:
                failures[resource.name] = error
        return failures

    def is_known(failures: dict[str, KafkaException]) -> bool:
        # A topic that was just made is not known to all brokers for a moment.
        return all(error.args[0].code() != KafkaError.UNKNOWN_TOPIC_OR_PART for error in failures.values())

    failures = ask_again(ask, _NEW_TOPIC_BUDGET_S, _POLL_S, until=is_known)
    for name, error in failures.items():
        need, is_lacking = "", is_missing_right(error)
        if is_lacking:
            need = f": {lacking_text([topic_right(Operation.DESCRIBE_CONFIGS, name)], principal)}"
        _log.log(
            logging.INFO if is_lacking and not is_duty else logging.WARNING,
            "it is not known whether topic %s has cleanup.policy=delete, retention.ms=-1, retention.bytes=-1 and "
            "message.timestamp.type=LogAppendTime, without which it can lose transactions: %s%s",
            name,
            reason(error),
            need,
        )
    return found


def _corrected(admin: AdminClient, topic: str, wrong: Mapping[str, str]) -> str | None:
    """Change settings of a topic; return why that could not be, or None."""
    entries = [ConfigEntry(name, right, incremental_operation=AlterConfigOpType.SET) for name, right in wrong.items()]
    resource = ConfigResource(ConfigResource.Type.TOPIC, topic, incremental_configs=entries)
    try:
        for future in admin.incremental_alter_configs([resource], request_timeout=_ANSWER_S).values():
            future.result()
    except KafkaException as error:
        return reason(error)
    return None
