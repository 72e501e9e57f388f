"""Which topics there are by name, and which they are: a topic made again under an old name has another id.

Asked by name, the brokers say why a topic cannot be seen: that there is none, or that this client may not know.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from confluent_kafka import KafkaError, KafkaException, TopicCollection
from confluent_kafka.admin import AdminClient

from penstock.clients.causes import ClientWords
from penstock.clients.kafka_errors import reason
from penstock.clients.requests.answers import Asked

#: Seconds that a broker may take to answer.
_ANSWER_S = 5.0
#: What a broker says that has no topic ids: 16 zero bytes in base 64.
_NO_ID = "A" * 22


def described(
    admin: AdminClient, topics: Iterable[str], timeout_s: float = _ANSWER_S, *, with_operations: bool = False
) -> tuple[dict[str, Any], dict[str, KafkaException]]:
    """Return the `TopicDescription` of each topic, and by name why the brokers say nothing of the others."""
    names = sorted(set(topics))
    if not names:
        return {}, {}
    asked = admin.describe_topics(
        TopicCollection(names), include_authorized_operations=with_operations, request_timeout=timeout_s
    )
    return Asked(admin, asked, timeout_s, lambda found, failed: (found, failed)).wait()


def id_of(description: Any) -> str | None:
    """Return the id of a described topic, or None from brokers that have no ids."""
    text = str(description.topic_id)
    return None if text == _NO_ID else text


@dataclass(frozen=True, slots=True)
class TopicIds:
    """Which topics there are, as the brokers answered: a topic that was deleted and made again has another id."""

    #: Id of each topic that has one.
    ids: Mapping[str, str]
    #: Topics that do not exist.
    absent: frozenset[str] = frozenset()
    #: Why there is no answer on a topic.
    failures: Mapping[str, str] = field(default_factory=dict)


def ask_topic_ids(admin: AdminClient, topics: Iterable[str], timeout_s: float) -> Asked[str, Any, TopicIds]:
    """Ask for the ids of topics; `KafkaException` where the client library refuses to ask."""
    asked = admin.describe_topics(TopicCollection(list(topics)), request_timeout=timeout_s)
    return Asked(admin, asked, timeout_s, partial(_read, admin))


def _read(admin: AdminClient, found: Mapping[str, Any], failed: Mapping[str, KafkaException]) -> TopicIds:
    failures = {topic: reason(error) for topic, error in failed.items()}
    codes = {topic: error.args[0].code() for topic, error in failed.items()}
    absent = frozenset(topic for topic, code in codes.items() if code == KafkaError.UNKNOWN_TOPIC_OR_PART)
    words: ClientWords | None = getattr(admin, "words", None)
    if words is not None:
        # Why no broker answers stands in the client's log alone, which it hears of here.
        admin.poll(0)
        # Numbers below zero are the client's own errors: no broker has said anything.
        if found or any(code > 0 for code in codes.values()):
            words.clear()
        elif words.cause is not None:
            failures = {topic: f"{why}; {words.cause}" for topic, why in failures.items()}
    ids = {topic: known for topic, described in found.items() if (known := id_of(described)) is not None}
    return TopicIds(ids, absent, failures)
