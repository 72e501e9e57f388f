"""Actions on transactions: done here where their store is in Kafka, else told to the coordinator that a group names."""

from __future__ import annotations

from penstock.fleet.actions import of_kafka
from penstock.fleet.actions.action import Action
from penstock.fleet.actions.of_members import MemberAction
from penstock.fleet.actions.parameters import Parameters
from penstock.fleet.commands.command import DECISIONS, Command


def settle(given: Parameters) -> Action:
    """Return the action that decides a transaction."""
    if given.text_or_none("group") is None:
        return of_kafka.settle(given)
    decision = given.choice("decision", DECISIONS)
    return _of_coordinator("settle", given, decision)


def resume_transaction(given: Parameters) -> Action:
    """Return the action that brings a transaction back."""
    if given.text_or_none("group") is None:
        return of_kafka.resume_transaction(given)
    return _of_coordinator("resume-transaction", given, None)


def _of_coordinator(name: str, given: Parameters, decision: str | None) -> MemberAction:
    # One of them: a second that does it, too, would be refused.
    group, member = given.text("group"), given.text("member")
    transaction_id = of_kafka.transaction_id(given)
    return MemberAction(Command(name, group, member, transaction_id=transaction_id, decision=decision))
