"""The examples of failures and of operations do what their first lines say."""

from __future__ import annotations

import re

import pytest
from example_programs import Examples

pytestmark = pytest.mark.thorough


def booked(lines: list[str]) -> set[str]:
    """Return the payments that were booked."""
    return {found[1] for line in lines if (found := re.search(r"(payment-\d+) is booked", line))}


@pytest.mark.timeout(400)
def test_payments_are_retried_given_up_looked_at_and_replayed(examples: Examples) -> None:
    examples.feed("payments")
    gone = {"payment-7", "payment-17"}
    others = {f"payment-{n}" for n in range(30)} - gone

    with examples.run("retried_payments:app") as program:
        program.wait_for(lambda lines: sum("is in dlq.payments" in line for line in lines) >= 2)
        program.wait_for(lambda lines: booked(lines) >= others)
        assert program.stop() == 0, program.lines()
    lines = program.lines()
    assert booked(lines) == others
    assert sum("is in retry.retried-payments.payments" in line for line in lines) == 2
    assert sum("failed in book, try 1" in line for line in lines) == 6
    assert sum("again in 0.500 s" in line for line in lines) >= 3

    listed = examples.penstock("dlq", "ls", "dlq.payments")
    shown = examples.penstock("dlq", "show", "dlq.payments", "--last", "2", "--payload")
    assert "2 dead letters" in listed
    assert "builtins.KeyError" in listed
    assert len(re.findall("group +retried-payments", shown)) == 2
    assert all(payment in shown for payment in gone)

    with examples.run("retried_payments:app", {"RATES": "EUR=1.0,GBP=0.8"}) as program:
        replay = ("dlq", "replay", "dlq.payments", "--where", "exception=KeyError")
        dry = examples.penstock(*replay, "--dry-run")
        sent = examples.penstock(*replay)
        program.wait_for(lambda lines: booked(lines) >= gone)
        assert program.stop() == 0, program.lines()
    assert "2 would be sent from dlq.payments to payments" in dry
    assert "2 sent from dlq.payments to payments" in sent
    assert booked(program.lines()) == gone
    assert "nothing sent" in examples.penstock(*replay)


def test_operations_explain_change_count_and_trace(examples: Examples) -> None:
    examples.feed("parcels")

    lines = examples.python("operations.py").splitlines()

    explained = [
        re.match(r"parcels:(\d): lag (\d+), watermark 0, .* in flight \(\d+ bytes\), 0 gaps", line)
        for line in lines[:2]
    ]
    assert sum(int(one[2]) for one in explained if one is not None) == 100, lines
    assert any("held by offset 0, held by rate 0/s (" in line for line in lines[:2])
    assert re.fullmatch(r"100 handled by 4 workers, 0 failures, \d+ commits", lines[2])
    assert re.fullmatch(r"100 calls, the slowest took \d+\.\d{3} s; spans:", lines[3])
    assert {"poll parcels", "process parcels", "commit parcels"} <= set(lines[4:])
