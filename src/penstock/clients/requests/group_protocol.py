"""Whether the brokers take the members of `group.protocol=consumer` (KIP-848).

A client of that protocol says nothing where its coordinator lacks it: it asks for another coordinator, for ever. Nor
does it show what brokers take, save in its debug log.
"""

from __future__ import annotations

import re
from contextlib import suppress

from confluent_kafka import KafkaException

from penstock.clients.factory import producer
from penstock.errors import ConfigurationError
from penstock.options import ClientConfig

#: A line of that log for each kind of request that a broker takes (librdkafka 2.16).
_TAKEN = re.compile(r"ApiKey (\w+) \(\d+\) Versions \d+\.\.(\d+)")
_HEARTBEAT = "ConsumerGroupHeartbeat"
#: The version that the client sends, and no other (librdkafka 2.16). Kafka 3.9 takes 0.
_LEAST = 1
#: Seconds that brokers may take to answer.
_ANSWER_S = 10.0


class _TakenVersions:
    """Stands where the client library expects a `logging.Logger`, and notes what the broker takes that takes least."""

    def __init__(self) -> None:
        self.highest: dict[str, int] = {}

    def log(self, _level: int, _text: str, /, *arguments: object) -> None:
        if arguments and (found := _TAKEN.search(str(arguments[-1]))):
            self.highest[found[1]] = min(int(found[2]), self.highest.get(found[1], int(found[2])))


def require_consumer_protocol(bootstrap_servers: str, config: ClientConfig) -> bool:
    """Raise `ConfigurationError` where the brokers are too old for `group.protocol=consumer`.

    Returns whether they said what they accept; where they did not, nothing is raised.
    """
    taken = _TakenVersions()
    client = producer(bootstrap_servers, {**config, "debug": "feature", "logger": taken})
    with suppress(KafkaException):
        client.list_topics(timeout=_ANSWER_S)
    client.poll(0)  # hands the log over
    highest = taken.highest.get(_HEARTBEAT, -1)
    if taken.highest and highest < _LEAST:
        has = f"take {_HEARTBEAT} up to version {highest}" if highest >= 0 else f"do not take {_HEARTBEAT}"
        raise ConfigurationError(
            f"config['group.protocol'] is 'consumer', and the brokers {has}, while the client needs version {_LEAST}: "
            "Kafka has it since 4.0; leave group.protocol out, or use newer brokers"
        )
    return bool(taken.highest)
