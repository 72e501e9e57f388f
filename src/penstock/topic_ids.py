"""Which topics there are by name, and which they are: a topic made anew under an old name has another id.

Asked by name, because only then the brokers say why a topic cannot be seen: that there is none, or that this client may
not know. In the list of all topics both look the same.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future
from typing import Any

from confluent_kafka import KafkaException, TopicCollection
from confluent_kafka.admin import AdminClient

#: Seconds that a broker may take to answer.
_ANSWER_S = 5.0
#: What a broker says that has no topic ids: 16 zero bytes in base 64.
_NO_ID = "A" * 22


def described(
    admin: AdminClient, topics: Iterable[str], timeout_s: float = _ANSWER_S
) -> tuple[dict[str, Any], dict[str, KafkaException]]:
    """Return what the brokers say of topics, and why they say nothing of the others.

    Args:
        admin: an admin client.
        topics: their names.
        timeout_s: seconds that a broker may take to answer.

    Returns:
        The client's `TopicDescription` by name, and the errors by name.
    """
    names = sorted(set(topics))
    if not names:
        return {}, {}
    futures: dict[str, Future[Any]] = admin.describe_topics(TopicCollection(names), request_timeout=timeout_s)
    found: dict[str, Any] = {}
    failed: dict[str, KafkaException] = {}
    for name, future in futures.items():
        try:
            found[name] = future.result()
        except KafkaException as error:
            failed[name] = error
    return found, failed


def id_of(description: Any) -> str | None:
    """Return the id of a described topic, or None from brokers that have no ids."""
    told = str(description.topic_id)
    return None if told == _NO_ID else told


def topic_ids(admin: AdminClient, topics: Iterable[str]) -> dict[str, str]:
    """Return the ids of topics by name, waiting for the answer; without those that are not told."""
    found, _ = described(admin, topics)
    return {name: told for name, one in found.items() if (told := id_of(one)) is not None}


__all__ = ["described", "id_of", "topic_ids"]
