"""Commands to a coordinator, and refusals of coordinators and members: pure; tests/fleet has the whole way."""

from __future__ import annotations

from unittest.mock import Mock

import pytest

from penstock.errors import DecisionNotStoredError, TransactionRefusedError
from penstock.fleet.commands.command import Command
from penstock.fleet.commands.execution import execute
from penstock.fleet_member import Member, Outcome, StoreOperator

SETTLE = Command("settle", "shop.coordinator", None, {"transaction_id": "t1", "decision": "commit"}, "somebody")
RESUME = Command("resume-transaction", "shop.coordinator", None, {"transaction_id": "t1"}, "somebody")


@pytest.mark.parametrize(
    ("raised", "outcome"),
    [
        (TransactionRefusedError("another stands"), Outcome.REFUSED),
        (DecisionNotStoredError("no answer"), Outcome.FAILED),  # it may be stored
        (RuntimeError("secret"), Outcome.FAILED),
    ],
)
def test_what_a_store_raises_is_the_outcome_and_its_text_is_not_shown(raised: Exception, outcome: Outcome) -> None:
    answer = execute(SETTLE, StoreOperator(Mock(side_effect=raised), Mock()))

    assert answer.outcome is outcome
    assert "secret" not in answer.said


def test_a_member_settles_nothing_and_a_coordinator_does_nothing_to_handlers() -> None:
    calls = Mock()
    member, operator = Member(calls, calls, calls, calls), StoreOperator(calls, calls)

    of_member = [execute(one, member) for one in (SETTLE, RESUME)]
    asked = [Command(name, "shop", None, {"topic": "t"}) for name in ("pause", "resume", "stacks")]
    of_store = [execute(one, operator) for one in asked]

    assert {one.outcome for one in (*of_member, *of_store)} == {Outcome.REFUSED}
    assert "for a coordinator that hears commands" in of_member[0].said
    assert "is for a member with handlers" in of_store[0].said
    calls.assert_not_called()
