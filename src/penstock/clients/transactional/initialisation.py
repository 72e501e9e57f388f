"""`initialise`: a transactional producer takes its id over, without the library's pause of half a second."""

from __future__ import annotations

import contextlib

from confluent_kafka import KafkaException, Producer

#: Seconds to wait for a connection.
_CONNECT_S = 1.0


def initialise(producer: Producer, topic: str, timeout_s: float) -> None:
    """Call `init_transactions` with a connection that stands. `topic` is one that is there; without one it may not yet.

    The library looks for the transaction coordinator when it is told to, and where no connection stands by then, half
    a second later (librdkafka 2.16, seen in one of eight starts). Raises `KafkaException` as `init_transactions`.
    """
    if topic:
        with contextlib.suppress(KafkaException):
            producer.list_topics(topic, timeout=min(timeout_s, _CONNECT_S))
    producer.init_transactions(timeout_s)
