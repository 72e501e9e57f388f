"""The settings of transactional producers."""

from __future__ import annotations

from typing import Any

from penstock.clients.transactional.end_watch import CONTEXT
from penstock.options import ClientConfig

#: A writer that dies in a transaction holds readers back no longer than this, or until its successor opens; on slow
#: brokers it is longer (see `Pace`).
TRANSACTION_S = 10.0
#: Seconds within which some message has to be stored where brokers are well: less than a transaction may take, so that
#: one that cannot be ends in an abort.
DELIVERY_S = 5.0


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
