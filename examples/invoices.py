"""Handlers that publish: an order comes in, an invoice and a line of the audit log go out.

What a handler returns is written, and only then its order is done: an order without its invoice is handled again.
Topics: `orders`, and `invoices` and `audit`, which must exist. Then, in this folder:

    penstock run invoices:app
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any, cast

import penstock

app = penstock.App(
    "invoices", bootstrap_servers=os.environ.get("PENSTOCK_BOOTSTRAP_SERVERS", "127.0.0.1:9092"), workers=8
)


@app.handler("orders", decoder="json", to="invoices", encoder="json", on_failure="dead_letter")
def invoice(message: penstock.Message) -> Iterator[object]:
    """Return the invoice of an order, with the order's key, and a line for the audit log."""
    order = cast("dict[str, Any]", message.body)
    yield {"order": order["id"], "sum": order["price"] * order["copies"]}
    yield penstock.Outgoing("audit", b"invoiced %d" % order["id"], headers={"partition": str(message.partition)})
