"""The example of handlers that publish, on a Kafka in memory."""

from __future__ import annotations

import runpy
from pathlib import Path

from penstock.testing import TestApp

EXAMPLE = Path(__file__).parents[2] / "examples" / "invoices.py"


def test_an_order_makes_an_invoice_and_a_line_of_the_audit_log() -> None:
    app = runpy.run_path(str(EXAMPLE))["app"]

    with TestApp(app, topics=["audit"]) as test:
        test.send("orders", b'{"id": 7, "price": 3, "copies": 2}', key="c1")
        test.send("orders", b"no order", key="c1")
        test.settle()
        (invoice,) = test.published("invoices")
        (line,) = test.published("audit")
        (dead,) = test.dead_letters("orders")

    assert (invoice.key, invoice.value) == (b"c1", b'{"order":7,"sum":6}')
    assert line.value == b"invoiced 7"
    assert dead.value == b"no order"
