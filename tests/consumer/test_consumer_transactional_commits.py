"""Commits by Kafka transactions: of which membership they tell the publisher."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from penstock.consumer.assignments import Assignments
from penstock.consumer.polling.committing.transactional_commits import TransactionalCommits


class Clock:
    """Time that stands still."""

    def monotonic(self) -> float:
        return 0.0


def commits_for(publisher: object) -> TransactionalCommits:
    clock: Any = Clock()
    told: Any = publisher
    return TransactionalCommits(Assignments(), 1.0, clock, lambda: None, told)


@pytest.mark.parametrize(
    ("ids", "told"),
    [(("m1", "m1"), ["proof"]), (("", ""), []), ((None, None), []), (("m1", ""), []), (("", "m2"), [])],
)
def test_who_is_no_member_of_the_group_tells_no_proof_of_it(ids: tuple[str | None, ...], told: list[str]) -> None:
    # Kafka fences no positions in a transaction that name no member.
    found: list[object] = []
    answers = iter(ids)
    client: Any = SimpleNamespace(memberid=lambda: next(answers), consumer_group_metadata=lambda: "proof")

    commits_for(SimpleNamespace(set_metadata=found.append)).note_rebalanced(client)

    assert found == told


def test_a_right_that_a_transaction_lacks_is_asked_for_once() -> None:
    asked: list[bool] = []
    publisher = SimpleNamespace(lacks_right=True, wants_metadata=False, set_metadata=lambda _: None, transactions=0)
    commits = commits_for(publisher)
    commits.on_missing_right = lambda: asked.append(True)
    client: Any = SimpleNamespace(memberid=lambda: "m1", consumer_group_metadata=lambda: "proof")

    commits.tick(client, 0.0)
    commits.tick(client, 0.0)

    assert asked == [True]
