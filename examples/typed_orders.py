"""Typed bodies: events are filtered by a header, ordered by another, and decoded to a dataclass.

Instead of the function of bytes, `decoder=` takes a pydantic model, a msgspec struct, or "json". A message that cannot
be decoded is not tried again: it goes to the dead letters at once.

`python examples/feed.py shop-events` writes messages (see there for the broker); then, in this folder:

    penstock run typed_orders:app
"""

from __future__ import annotations

import json
import logging
import os
from dataclasses import dataclass
from typing import cast

import penstock

log = logging.getLogger("orders")
app = penstock.App(
    "typed-orders", bootstrap_servers=os.environ.get("PENSTOCK_BOOTSTRAP_SERVERS", "127.0.0.1:9092"), workers=8
)


@dataclass(frozen=True, slots=True)
class Order:
    """The content of an order."""

    item: str
    copies: int

    @classmethod
    def decode(cls, value: bytes) -> Order:
        """Make an order of a message's value. If this raises, for example for a missing field, it is a dead letter."""
        return cls(**json.loads(value))


def is_order(message: penstock.Message) -> bool:
    """Return whether a message is an order, by its header. Other messages are done at once and counted as filtered."""
    return message.header("type") == b"order"


@app.handler("shop-events", filter=is_order, key="header:customer", decoder=Order.decode, on_failure="dead_letter")
def ship(message: penstock.Message) -> None:
    """Ship one customer's orders in order. The customer is in a header: the records have no key."""
    order = cast("Order", message.body)
    log.info("%s gets %d copies of %s", (message.header("customer") or b"").decode(), order.copies, order.item)
