"""What the brokers say of targets beside a Kafka transaction: are they there, and do they take its markers."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from confluent_kafka import KafkaError, KafkaException, Producer
from confluent_kafka.admin import (  # type: ignore[attr-defined] # not in its __all__
    AdminClient,
    ConfigResource,
    ResourceType,
)

from penstock.clients.requests.topics import hidden_topics
from penstock.clients.transactional.faults import Blamed, Fault, blamed

#: Seconds for a question to the brokers.
ASK_S = 2.0
#: What a topic must take at least: a marker has fewer bytes.
_MARKER_BYTES = 200
#: Topics that are asked for one by one; more are asked for in one question for all.
_ONE_BY_ONE = 3


class TargetProbe:
    """Asks the brokers about targets; `why` says why a topic takes nothing, of an error. Used by one thread."""

    def __init__(self, admin: AdminClient, why: Callable[[str, KafkaError], str]) -> None:
        self._admin = admin
        self._why = why

    def missing(self, producer: Producer, topics: set[str]) -> dict[str, Fault]:
        """Return those topics that are not there, or are not to be seen; none where brokers are away."""
        try:
            if len(topics) > _ONE_BY_ONE:
                known = dict(producer.list_topics(timeout=ASK_S).topics)
            else:
                known = {one: producer.list_topics(one, timeout=ASK_S).topics[one] for one in topics}
        except (KafkaException, KeyError):
            # The transaction tells.
            return {}
        absent, hidden = KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART), KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED)
        errors = {name: known[name].error if name in known else absent for name in topics}
        # The list of all has only what may be seen.
        errors.update(dict.fromkeys(hidden_topics(self._admin, topics - known.keys(), ASK_S), hidden))
        return {
            name: Fault(f"{name}: {self._why(name, error)}", whole=True)
            for name, error in errors.items()
            if error is not None and blamed(error) is Blamed.TOPIC
        }

    def take_no_markers(self, topics: Iterable[str]) -> dict[str, Fault]:
        """Return those topics whose longest message is so short that transactions there never end."""
        resources = [ConfigResource(ResourceType.TOPIC, topic) for topic in dict.fromkeys(topics)]
        found: dict[str, Fault] = {}
        if not resources:
            return found
        for resource, answer in self._admin.describe_configs(resources, request_timeout=ASK_S).items():
            try:
                limit = int(answer.result(ASK_S)["max.message.bytes"].value)
            except (KafkaException, KeyError, ValueError, TimeoutError):
                # Not allowed to ask, or away: what is done there tells.
                continue
            if limit < _MARKER_BYTES:
                why = f"{resource.name}: its max.message.bytes is {limit}, too little for the markers of transactions"
                found[resource.name] = Fault(why, whole=True)
        return found
