"""The order service with PostgreSQL publishes what its database holds, whatever befell its local transactions."""

from __future__ import annotations

import pytest
from example_programs import Examples

from databases import new_database
from penstock.devbroker import DevBroker

pytestmark = pytest.mark.thorough


def test_the_order_service_with_a_barrier_has_the_same_in_its_database_and_its_topic(
    examples: Examples, broker: DevBroker, postgresql_url: str
) -> None:
    url = new_database(postgresql_url).url.replace("postgresql+psycopg", "postgresql")

    lines = examples.python("orders_postgresql.py", url, broker.bootstrap_servers).splitlines()

    orders = ["  alice: order 1", "  carol: order 2"]
    assert lines == ["dave's order came too late", "in the topic:   ", *orders, "in the database:", *orders]
