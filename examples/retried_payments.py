"""Failures: what is tried again and when, what waits in a retry topic, and what becomes a dead letter.

`python examples/feed.py payments` writes messages (see there for the broker); then, in this folder:

    penstock run retried_payments:app                            # Ctrl-C when it is quiet: GBP has no rate
    penstock dlq ls dlq.payments                                 # how many, where from, why
    penstock dlq show dlq.payments --last 2                      # their headers and stacks; --payload for the content
    RATES=EUR=1.0,GBP=0.8 penstock run retried_payments:app &    # the cause is fixed
    penstock dlq replay dlq.payments --where exception=KeyError  # back to `payments`; --dry-run to look first
"""

from __future__ import annotations

import logging
import os
from collections import Counter
from typing import Any, cast

import tenacity

import penstock

log = logging.getLogger("payments")
RATES = {name: float(rate) for name, rate in (pair.split("=") for pair in os.getenv("RATES", "EUR=1").split(","))}

app = penstock.App(
    "retried-payments",
    bootstrap_servers=os.environ.get("PENSTOCK_BOOTSTRAP_SERVERS", "127.0.0.1:9092"),
    # The app stops when it gives up 20 messages in a row, or half of all done messages, from 100 on.
    dead_letter_limit=penstock.DeadLetterLimit(consecutive=20, ratio=0.5, at_least=100),
)
policy = penstock.retry(
    attempts=4,
    wait=tenacity.wait_exponential_jitter(multiplier=0.1, max=5),
    retry=tenacity.retry_if_not_exception_type(KeyError),  # no rate: an immediate retry does not help
)
calls: Counter[str] = Counter()


@app.handler("payments", decoder="json", retry=policy, retry_delays=(1.0,), on_failure="dead_letter")
def book(message: penstock.Message) -> None:
    """Book a payment at a bank that is away for some first calls and too busy for others."""
    payment = cast("dict[str, Any]", message.body)
    name = payment["id"]
    calls[name] += 1
    if calls[name] == 1 and name.endswith("0"):
        raise ConnectionError("the bank is away")  # again after the policy's wait; meanwhile the account's key waits
    if calls[name] == 1 and name.endswith("5"):
        raise penstock.RetryLater(0.5)  # the bank named the time
    log.info("%s is booked: %.2f", name, payment["amount"] / RATES[payment["currency"]])
