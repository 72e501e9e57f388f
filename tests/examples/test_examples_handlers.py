"""The examples of handlers do what their first lines say."""

from __future__ import annotations

import re
import sqlite3
from collections import defaultdict
from contextlib import closing
from pathlib import Path

import pytest
from example_programs import Examples

from kafka_tools import read_all
from penstock.dead_letters.headers import read
from penstock.devbroker import DevBroker

pytestmark = pytest.mark.thorough


def matches(pattern: str, lines: list[str]) -> list[tuple[str, ...]]:
    """Return the groups of each line that holds the pattern."""
    return [found.groups() for line in lines if (found := re.search(pattern, line))]


def numbers_by_key(found: list[tuple[str, ...]]) -> dict[str, list[int]]:
    """Return the second groups, as numbers, in the order they were printed, by the first."""
    by_key: dict[str, list[int]] = defaultdict(list)
    for key, number, *_ in found:
        by_key[key].append(int(number))
    return by_key


def test_async_handlers_price_baskets_at_once_and_those_of_one_customer_in_order(examples: Examples) -> None:
    examples.feed("baskets")

    with examples.run("async_prices:app") as program:
        program.wait_for(lambda lines: len(matches(r"basket (\d+) costs", lines)) >= 200)
        code = program.stop()

    lines = program.lines()
    priced = numbers_by_key(matches(r"^(customer-\d+): basket (\d+) costs", lines))
    [(calls, most)] = matches(r"closed after (\d+) calls, at most (\d+) at once", lines)
    assert code == 0, lines
    assert priced == {f"customer-{n}": list(range(n, 200, 40)) for n in range(40)}
    assert lines.index("the client is open") < lines.index(f"customer-0: basket 0 costs {10 * len('basket 0')}")
    assert int(calls) == 200
    assert 1 < int(most) <= 20


def test_batches_store_what_is_good_and_the_bad_rows_become_dead_letters(
    examples: Examples, broker: DevBroker, tmp_path: Path
) -> None:
    examples.feed("readings")
    file = tmp_path / "readings.db"

    def stored() -> list[tuple[str, float]]:
        with closing(sqlite3.connect(file)) as connection:
            return connection.execute("SELECT sensor, celsius FROM readings ORDER BY part, place").fetchall()

    with examples.run("sqlite_batches:app", {"READINGS_DB": str(file)}) as program:
        program.wait_for(lambda lines: sum("is in dlq.readings" in line for line in lines) >= 4)
        program.wait_for(lambda _: len(stored()) >= 497)
        code = program.stop()

    rows = defaultdict(list)
    for sensor, celsius in stored():
        rows[sensor].append(celsius)
    good = {f"sensor-{n}": [place / 10 for place in range(n, 500, 20) if place not in {7, 157, 307}] for n in range(20)}
    letters = [read(letter.headers() or ()) for letter in read_all(broker.bootstrap_servers, "dlq.readings")]
    reasons = sorted(str(origin and origin.exception) for origin in letters)
    assert code == 0, program.lines()
    assert rows == good
    assert reasons == ["penstock.errors.MessageFormatError", *["sqlite3.IntegrityError"] * 3]
    assert "4 dead letters" in examples.penstock("dlq", "ls", "dlq.readings")


def test_typed_orders_are_filtered_ordered_by_a_header_and_decoded(examples: Examples, broker: DevBroker) -> None:
    examples.feed("shop-events")

    with examples.run("typed_orders:app") as program:
        program.wait_for(lambda lines: any("is in dlq.shop-events" in line for line in lines))
        program.wait_for(lambda lines: len(matches(r"(copies of book)", lines)) >= 40)
        code = program.stop()

    shipped = matches(r"(customer-\d) gets (\d+) copies of book (\d+)$", program.lines())
    [letter] = read_all(broker.bootstrap_servers, "dlq.shop-events")
    origin = read(letter.headers() or ())
    assert code == 0, program.lines()
    assert len(shipped) == 40
    assert all(copies == book for _, copies, book in shipped)
    assert {customer for customer, _, _ in shipped} == {f"customer-{n}" for n in range(4)}
    assert origin is not None
    assert origin.exception == "penstock.errors.MessageFormatError"
    assert origin.attempts == 1


def test_a_deferred_completion_keeps_a_devices_order_and_lets_one_worker_push_to_many(examples: Examples) -> None:
    examples.feed("notifications")

    with examples.run("deferred_push:app") as program:
        program.wait_for(lambda lines: len(matches(r"(got text)", lines)) >= 80)
        code = program.stop()

    got = matches(r"(device-\d) got text (\d+) by (push_\d+)$", program.lines())
    failed = [line for line in program.lines() if "failed in push, try 1" in line]
    assert code == 0, program.lines()
    assert numbers_by_key(got) == {f"device-{n}": list(range(n, 80, 8)) for n in range(8)}
    assert len({thread for _, _, thread in got}) > 1
    assert len(failed) == 8, "the texts that end with 3 fail once"
