"""What a transactional producer is made with, and the limits of its calls, which follow how slow the brokers are.

A limit that fits brokers which are well gives up on slow ones what would have come: it takes a topic for one that takes
no message, a producer for one that hangs, and does the same work again. So limits grow with what is measured (`Pace`),
within a bound that the user sets, and shrink again.
"""

from __future__ import annotations

import contextlib
from typing import Any

from confluent_kafka import KafkaException, Producer

from penstock.clients.transactional.end_watch import CONTEXT
from penstock.options import ClientConfig

#: The most seconds that a limit grows to, unless the user sets another.
MOST_S = 30.0
#: A limit is so many times the slowest transaction of late.
_TIMES = 4.0
#: What is left of the slowest with each that was quicker.
_KEPT = 0.9


class Pace:
    """The seconds that Kafka transactions take on one cluster, from their begin to the answer of their end.

    Noted by every thread that publishes, asked by any: it is one number, and a note that is lost to another one at the
    same moment is as good as that one.

    Args:
        most_s: seconds that no limit grows beyond; a limit that is longer anyway stays what it is.
    """

    def __init__(self, most_s: float = MOST_S) -> None:
        self._most_s = most_s
        self._slow_s = 0.0

    def note(self, took_s: float) -> None:
        """Take note of how long a transaction took, or has taken by now; one that was given up, too."""
        self._slow_s = max(took_s, self._slow_s * _KEPT)

    def limit(self, well_s: float, times: float = _TIMES) -> float:
        """Return the limit in seconds of what may take `well_s` on brokers that are well.

        It grows to so many `times` the slowest transaction of late.
        """
        return max(well_s, min(times * self._slow_s, self._most_s))


def producer_settings(
    config: ClientConfig, transactional_id: str, timeout_s: float, *, apart: bool, reports_all: bool
) -> dict[str, Any]:
    """Return the settings of a transactional producer, for the client library.

    No other running producer uses the id. The broker ends a transaction after `timeout_s` seconds. Where it writes
    `apart`, each message is a batch, so that what the broker refuses is named. With `reports_all`, deliveries that
    succeeded are reported, too.
    """
    debug = str(config.get("debug", ""))
    settings: dict[str, Any] = {
        # All is handed over before the first of it is sent, for who waits for deliveries flushes: a transaction is one
        # request or two. What is handed over while a request is under way would have the library ask for its answer
        # again and again without a pause, which took up to a third of a full core.
        "linger.ms": 50,
        # What was taken from its producer shall not fail here on the client's own limit: the broker's decides.
        "message.max.bytes": 100_000_000,
        "queue.buffering.max.messages": 1_000_000,
        # Transactions are short-lived; who waits for deliveries gives up before.
        "message.timeout.ms": int(timeout_s * 1000),
        # The broker answers CONCURRENT_TRANSACTIONS for some milliseconds after each commit, while it writes the
        # markers; the library then waits this long, and its default of 100 ms would be the latency of everything.
        "retry.backoff.ms": 1,
        "retry.backoff.max.ms": 5,
        # A topic deleted a moment ago fails soon, not after the default 30 s.
        "topic.metadata.propagation.max.ms": 3_000,
        "batch.size": 1 if apart else 1_000_000,
        **config,
        "transactional.id": transactional_id,
        "transaction.timeout.ms": int(timeout_s * 1000),
        "delivery.report.only.error": not reports_all,
        "debug": f"{debug},{CONTEXT}" if debug else CONTEXT,
    }
    if apart:
        # A topic made a moment ago knows nothing of this producer and takes any sequence number first: of two
        # requests under way, the second may pass the first, whose messages are then lost as "duplicates". And the
        # abort of a refused message waits for seconds where others are under way behind it.
        settings["max.in.flight"] = 1
    return settings


#: Seconds to wait for a connection.
_CONNECT_S = 1.0


def initialise(producer: Producer, topic: str, timeout_s: float) -> None:
    """Call `init_transactions` with a connection that stands. `topic` is one that is there; without one it may not yet.

    The library looks for the transaction coordinator when it is asked to, and where no connection stands by then, half
    a second later (librdkafka 2.16, seen in one of eight starts). Raises `KafkaException` as `init_transactions`.
    """
    if topic:
        with contextlib.suppress(KafkaException):
            producer.list_topics(topic, timeout=min(timeout_s, _CONNECT_S))
    producer.init_transactions(timeout_s)
