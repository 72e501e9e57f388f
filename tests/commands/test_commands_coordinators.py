"""What a coordinator does by command, and what it and a member refuse: pure; the whole way is in tests/dashboard."""

from __future__ import annotations

import pytest

from penstock.commands.audit import Outcome
from penstock.commands.carrying_out import Member, StoreOperator, carry_out
from penstock.commands.command import Command
from penstock.errors import DecisionNotStoredError, TransactionRefusedError

SETTLE = Command("settle", "shop.coordinator", transaction_id="t1", decision="commit", by="somebody")
RESUME = Command("resume-transaction", "shop.coordinator", transaction_id="t1", by="somebody")


class Desk:
    """Notes what a store is asked for, and answers or raises what it was given."""

    def __init__(self, answer: Outcome | Exception = Outcome.DONE) -> None:
        self.asked: list[tuple[str, ...]] = []
        self._answer = answer
        self.operator = StoreOperator(self._settle, self._resume)

    def _settle(self, *given: str) -> tuple[Outcome, str]:
        self.asked.append(given)
        if isinstance(self._answer, Exception):
            raise self._answer
        return self._answer, "decided"

    def _resume(self, *given: str) -> str:
        self.asked.append(given)
        return "brought back"


def nothing(*_: object) -> str:
    raise AssertionError("it was called")


def test_a_coordinator_settles_and_resumes_with_who_asked_and_the_id_of_the_command() -> None:
    desk = Desk()

    answers = [carry_out(SETTLE, desk.operator), carry_out(RESUME, desk.operator)]

    assert [(one.outcome, one.said) for one in answers] == [(Outcome.DONE, "decided"), (Outcome.DONE, "brought back")]
    assert desk.asked == [("t1", "commit", "somebody", SETTLE.id), ("t1", "somebody", RESUME.id)]


@pytest.mark.parametrize(
    ("raised", "outcome"),
    [
        (TransactionRefusedError("another stands"), Outcome.REFUSED),
        # It may be stored.
        (DecisionNotStoredError("no answer"), Outcome.FAILED),
        (RuntimeError("secret"), Outcome.FAILED),
    ],
)
def test_what_a_store_raises_is_told(raised: Exception, outcome: Outcome) -> None:
    answer = carry_out(SETTLE, Desk(raised).operator)

    assert answer.outcome is outcome
    assert "secret" not in answer.said


def test_a_decision_that_waits_for_its_effect_is_told_as_sent() -> None:
    assert carry_out(SETTLE, Desk(Outcome.SENT).operator).outcome is Outcome.SENT


def test_a_member_settles_nothing_and_a_coordinator_does_nothing_to_handlers() -> None:
    member, desk = Member(nothing, nothing, nothing, dict), Desk()  # type: ignore[arg-type] # none is called

    of_member = [carry_out(one, member) for one in (SETTLE, RESUME)]
    of_store = [carry_out(Command(name, "shop", topic="t"), desk.operator) for name in ("pause", "resume", "stacks")]

    assert {one.outcome for one in (*of_member, *of_store)} == {Outcome.REFUSED}
    assert "for a coordinator that hears commands" in of_member[0].said
    assert desk.asked == []
