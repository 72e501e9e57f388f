"""The settings of a transactional producer, and the time limits of its calls, which adapt to slow brokers.

A limit that fits healthy brokers is too short for slow ones: a slow topic would count as refusing, a slow producer as
hanging, and the same work would be repeated. So limits grow with measured times (`Pace`), up to a bound that the user
sets, and shrink again.
"""

from __future__ import annotations

import contextlib
from typing import Any

from confluent_kafka import KafkaException, Producer

from penstock.clients.transactional.end_watch import CONTEXT
from penstock.options import ClientConfig

#: Seconds up to which a limit grows, unless the user sets another bound.
MOST_S = 30.0
#: A limit is this many times the slowest recent transaction.
_TIMES = 4.0
#: The factor by which each quicker transaction reduces the slowest time.
_KEPT = 0.9


class Pace:
    """The seconds that Kafka transactions take on one cluster, from the begin to the answer to the end.

    Written by every publishing thread, read by any. It is one number: if two threads write at once, losing one of the
    values does no harm.

    Args:
        most_s: the seconds up to which limits grow; a limit that is longer by itself stays unchanged.
    """

    def __init__(self, most_s: float = MOST_S) -> None:
        self._most_s = most_s
        self._slow_s = 0.0

    def note(self, took_s: float) -> None:
        """Note how long a transaction took, or has taken so far; also for one that was given up."""
        self._slow_s = max(took_s, self._slow_s * _KEPT)

    def limit(self, well_s: float, times: float = _TIMES) -> float:
        """Return the limit in seconds for a step that may take `well_s` on healthy brokers.

        The limit grows to `times` the slowest recent transaction.
        """
        return max(well_s, min(times * self._slow_s, self._most_s))


def producer_settings(
    config: ClientConfig, transactional_id: str, timeout_s: float, *, apart: bool, reports_all: bool
) -> dict[str, Any]:
    """Return the settings of a transactional producer, for the client library.

    No other running producer uses the id. The broker ends a transaction after `timeout_s` seconds. With `apart`, each
    message is a batch, so that the broker names the one it refuses. With `reports_all`, successful deliveries are
    reported, too.
    """
    debug = str(config.get("debug", ""))
    settings: dict[str, Any] = {
        # All messages are handed over before the first is sent: a transaction is one or two requests, and `flush` ends
        # the linger. Messages handed over during a request would make the library poll for its answer without a pause,
        # which took up to a third of a core.
        "linger.ms": 50,
        # The broker's limit decides: what a producer accepted must not fail on this client's own limit.
        "message.max.bytes": 100_000_000,
        "queue.buffering.max.messages": 1_000_000,
        # Transactions are short. The wait for deliveries ends before this.
        "message.timeout.ms": int(timeout_s * 1000),
        # For some milliseconds after each commit, while it writes the markers, the broker answers
        # CONCURRENT_TRANSACTIONS. The library then waits this long. Its default of 100 ms would add to every latency.
        "retry.backoff.ms": 1,
        "retry.backoff.max.ms": 5,
        # A deleted topic fails soon, not after the default 30 s.
        "topic.metadata.propagation.max.ms": 3_000,
        "batch.size": 1 if apart else 1_000_000,
        **config,
        "transactional.id": transactional_id,
        "transaction.timeout.ms": int(timeout_s * 1000),
        "delivery.report.only.error": not reports_all,
        "debug": f"{debug},{CONTEXT}" if debug else CONTEXT,
    }
    if apart:
        # A new topic does not know this producer and accepts any first sequence number. Of two requests under way, the
        # second may overtake the first, whose messages are then lost as "duplicates". And the abort after a refused
        # message takes seconds if other requests are under way behind it.
        settings["max.in.flight"] = 1
    return settings


#: Seconds to wait for a connection.
_CONNECT_S = 1.0


def initialise(producer: Producer, topic: str, timeout_s: float) -> None:
    """Connect by a question about `topic`, which must exist, then call `init_transactions`. Empty: no question.

    Without a connection, the library looks for the transaction coordinator half a second later (librdkafka 2.16, seen
    in one of eight starts). Raises `KafkaException` as `init_transactions`.
    """
    if topic:
        with contextlib.suppress(KafkaException):
            producer.list_topics(topic, timeout=min(timeout_s, _CONNECT_S))
    producer.init_transactions(timeout_s)
