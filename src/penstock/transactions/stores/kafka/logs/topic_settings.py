"""Checks the settings of the half, op and done topics: a coordinator refuses settings that lose transactions.

Retention deletes pending halves. Compaction deletes all but the newest record of a key. With `CreateTime`, producers'
clocks decide when a half is checked and a delayed message is published. An operator may have set these, or may have
created the topics with the broker's defaults.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import partial

from confluent_kafka import KafkaError, KafkaException

from penstock.clients.bounded_calls import ask_again
from penstock.clients.factory import AdminClient
from penstock.clients.kafka_errors import code_of, is_missing_right, reason
from penstock.clients.rights import Operation, lacking_text, principal_of, topic_right
from penstock.clients.topics import topic_settings
from penstock.errors import ConfigurationError
from penstock.transactions.wire.topics import StoreTopics

_log = logging.getLogger("penstock.transactions")

_ANSWER_S = 10.0
#: Seconds until all brokers know a new topic.
_NEW_TOPIC_BUDGET_S = 10.0
_POLL_S = 0.1
#: The size of a large record of the done log: a snapshot, or the notes of many transactions.
_DONE_BYTES = 1 << 20
#: The recommended limit, with which `topics` creates the log.
_DONE_ROOM = str(2 << 20)


def wrong_settings(settings: Mapping[str, str | None], *, is_done: bool) -> dict[str, str]:
    """Return the settings of a half, op or done topic that must change: the right values, by name. Pure.

    `settings` are the effective ones, by Kafka's names.
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


def check_settings(admin: AdminClient, topics: StoreTopics) -> None:
    """Check the settings of half, op and done, which exist.

    A wrong setting raises `ConfigurationError` with the command that corrects it. If a setting cannot be read, a
    warning names the missing permission.
    """
    names = (topics.half, topics.op, topics.done)

    def are_known(answer: tuple[object, Mapping[str, KafkaException]]) -> bool:
        # A new topic is not known to all brokers for a moment.
        return all(code_of(error) != KafkaError.UNKNOWN_TOPIC_OR_PART for error in answer[1].values())

    ask = partial(topic_settings, admin, names, _ANSWER_S)
    found, failed = ask_again(ask, _NEW_TOPIC_BUDGET_S, _POLL_S, until=are_known)
    for name, error in failed.items():
        right = topic_right(Operation.DESCRIBE_CONFIGS, name)
        need = lacking_text([right], principal_of(admin.config)) if is_missing_right(error) else ""
        _log.warning(
            "it is not known whether topic %s has cleanup.policy=delete, retention.ms=-1, retention.bytes=-1 and "
            "message.timestamp.type=LogAppendTime, without which it can lose transactions: %s",
            name,
            ": ".join(filter(None, (reason(error), need))),
        )
    for name, settings in found.items():
        wrong = wrong_settings(settings, is_done=name == topics.done)
        if wrong:
            current = ", ".join(f"{setting}={settings[setting]}" for setting in wrong)
            wanted = ",".join(f"{setting}={right}" for setting, right in wrong.items())
            raise ConfigurationError(
                f"topic {name} has {current}, which can lose transactions; change it by `kafka-configs.sh "
                f"--bootstrap-server {admin.servers} --alter --entity-type topics --entity-name {name} "
                f"--add-config {wanted}`"
            )
