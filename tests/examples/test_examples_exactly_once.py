"""The example of exactly once, which kills its worker and judges by a reader of committed messages."""

from __future__ import annotations

import re

import pytest
from example_programs import Examples

from penstock.devbroker import DevBroker

pytestmark = pytest.mark.thorough


def test_each_order_has_one_invoice_though_the_worker_was_killed(examples: Examples, broker: DevBroker) -> None:
    counts, order = examples.python("exactly_once_invoices.py", broker.bootstrap_servers).splitlines()

    found = re.fullmatch(r"1000 orders, 1000 invoices: (\d+) by the first, (\d+) by the second", counts)
    assert found is not None, counts
    assert sum(map(int, found.groups())) == 1000
    assert order == "in the order of each customer: yes"
