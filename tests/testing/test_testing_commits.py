"""Commits: stored ones, refused ones, and the effect of a fault on an answer."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from confluent_kafka import KafkaError
from memory_tools import Reader, broker_of, settle

from penstock.testing import Operation, TestBroker


def member_of(memory: TestBroker) -> Reader:
    """Return the only member of its group."""
    made = Reader(memory, "t")
    settle(made)
    return made


REFUSAL, REFUSED, LOST = KafkaError.REBALANCE_IN_PROGRESS, "REBALANCE_IN_PROGRESS", "_TRANSPORT"


@pytest.mark.parametrize(
    ("fault", "heard", "waited_for", "log"),
    [
        (lambda memory: memory.fail("commit", REFUSAL, times=2), ([REFUSED], [REFUSED]), (REFUSED, 0), []),
        (lambda memory: memory.fail("commit_async", REFUSAL), ([REFUSED], [REFUSED]), (None, 0), [2]),
        (lambda memory: memory.fail(Operation.COMMIT_SYNC, REFUSAL), ([None], [None]), (REFUSED, 0), [1]),
        # An error although the commit counts.
        (lambda memory: memory.lose_answer("commit", times=2), ([LOST], [LOST]), (LOST, 0), [1, 2]),
        (lambda memory: memory.delay_answer("commit_async", 5), ([], [None]), (None, 0), [1, 2]),
        # It is waited for, but not for ever.
        (lambda memory: memory.delay_answer("commit_sync", 5), ([None], [None]), (None, 5), [1, 2]),
        (lambda memory: memory.delay_answer("commit_sync", 100), ([None], [None]), ("_TIMED_OUT", 60), [1, 2]),
        # It takes the group back.
        (lambda memory: memory.repeat_request("commit_async", 3), ([None], [None]), (None, 0), [1, 2, 1]),
    ],
    ids=["refused", "async refused", "sync refused", "lost", "async late", "late", "too late", "repeated"],
)
def test_a_commit_goes_wrong_on_demand(
    fault: Callable[[TestBroker], None],
    heard: tuple[list[str | None], ...],
    waited_for: tuple[str | None, float],
    log: list[int],
) -> None:
    memory = broker_of(2)
    reader = member_of(memory)
    fault(memory)
    reader.commit_async(0, 1)
    settle(reader)
    at_once, begun = reader.heard, memory.clock.monotonic()
    answer = reader.commit(2)
    took = memory.clock.monotonic() - begun
    memory.advance(5)
    settle(reader)

    assert (at_once, reader.heard) == heard
    assert (answer, took) == waited_for
    assert [record.offset for record in memory.commit_log("g")] == log
    assert memory.faults.happened


def test_a_late_commit_meets_the_generation_of_its_arrival() -> None:
    memory = broker_of(2)
    reader = member_of(memory)
    memory.delay_request("commit_async", 5, times=2)
    reader.commit_async(0, 1)
    memory.rebalance("g", shuffle=False)
    settle(reader)
    reader.commit_async(0, 2)
    memory.advance(5)
    settle(reader)

    assert reader.heard == ["ILLEGAL_GENERATION", None]
    assert [record.offset for record in memory.commit_log("g")] == [2]


def test_faults_by_chance_follow_the_seed_and_end() -> None:
    def outcomes(seed: int) -> list[str | None]:
        memory = broker_of(seed=seed)
        reader = member_of(memory)
        memory.fail_by_chance("commit", KafkaError.REQUEST_TIMED_OUT, 0.5)
        found = [reader.commit(1) for _ in range(40)]
        memory.fail_by_chance("commit", KafkaError.REQUEST_TIMED_OUT, 0)
        assert reader.commit(1) is None
        return found

    assert outcomes(1) == outcomes(1)
    assert {*outcomes(1)} == {None, "REQUEST_TIMED_OUT"}


def test_an_unknown_operation_is_refused() -> None:
    with pytest.raises(ValueError, match="comit"):
        broker_of().fail("comit", KafkaError.REQUEST_TIMED_OUT)
