"""Commits: what is stored, what is refused, and what a fault makes of an answer."""

from __future__ import annotations

import pytest
from confluent_kafka import KafkaError
from memory_tools import Reader, settle

from penstock.testing import Operation, TestBroker


@pytest.fixture
def memory() -> TestBroker:
    """A broker with the topic `t` of two partitions."""
    broker = TestBroker()
    broker.create_topic("t", 2)
    return broker


@pytest.fixture
def reader(memory: TestBroker) -> Reader:
    """The one member of its group."""
    made = Reader(memory, "t")
    settle(made)
    return made


@pytest.mark.parametrize("operation", ["commit", "commit_sync", Operation.COMMIT_SYNC])
def test_a_commit_is_refused_on_demand(memory: TestBroker, reader: Reader, operation: str | Operation) -> None:
    memory.fail(operation, KafkaError.REBALANCE_IN_PROGRESS, times=2)

    codes = [reader.commit(number) for number in range(3)]

    assert codes == ["REBALANCE_IN_PROGRESS"] * 2 + [None]
    assert [one.offset for one in memory.commit_log("g")] == [2]
    assert memory.faults.happened == {Operation.COMMIT_SYNC: 2}


def test_a_fault_of_asynchronous_commits_spares_the_others(memory: TestBroker, reader: Reader) -> None:
    memory.fail("commit_async", KafkaError.NOT_COORDINATOR)

    assert reader.commit(1) is None
    reader.commit_async(0, 2)
    settle(reader)

    assert reader.heard == ["NOT_COORDINATOR"]
    assert memory.committed("g")["t", 0].offset == 1


def test_a_lost_answer_is_an_error_although_the_commit_counts(memory: TestBroker, reader: Reader) -> None:
    memory.lose_answer("commit", times=2)

    assert reader.commit(1) == "_TRANSPORT"
    reader.commit_async(0, 2)
    settle(reader)

    assert reader.heard == ["_TRANSPORT"]
    assert [one.offset for one in memory.commit_log("g")] == [1, 2]


def test_a_late_answer_comes_when_the_clock_gets_there(memory: TestBroker, reader: Reader) -> None:
    memory.delay_answer("commit_async", 5)
    reader.commit_async(0, 1)
    memory.advance(4)
    settle(reader)
    assert (reader.heard, memory.committed("g")["t", 0].offset) == ([], 1)

    memory.advance(1)
    settle(reader)

    assert reader.heard == [None]


def test_a_synchronous_commit_waits_for_its_late_answer_but_not_for_ever(memory: TestBroker, reader: Reader) -> None:
    begun = memory.clock.monotonic()
    memory.delay_answer("commit", 5)
    assert reader.commit(1) is None
    assert memory.clock.monotonic() - begun == 5

    memory.delay_answer("commit", 100)
    assert reader.commit(2) == "_TIMED_OUT"
    assert memory.clock.monotonic() - begun == 65


def test_a_late_commit_meets_the_generation_of_its_arrival(memory: TestBroker, reader: Reader) -> None:
    memory.delay_request("commit_async", 5, times=2)
    reader.commit_async(0, 1)
    memory.rebalance("g", shuffle=False)
    settle(reader)
    reader.commit_async(0, 2)
    memory.advance(5)
    settle(reader)

    assert reader.heard == ["ILLEGAL_GENERATION", None]
    assert [one.offset for one in memory.commit_log("g")] == [2]


def test_a_repeated_commit_takes_the_group_back(memory: TestBroker, reader: Reader) -> None:
    memory.repeat_request("commit_async", 3)
    reader.commit_async(0, 1)
    settle(reader)
    assert reader.commit(2) is None

    memory.advance(3)

    assert [one.offset for one in memory.commit_log("g")] == [1, 2, 1]
    assert reader.heard == [None]


def test_faults_by_chance_follow_the_seed_and_end() -> None:
    def outcomes(seed: int) -> list[str | None]:
        memory = TestBroker(seed)
        memory.create_topic("t")
        reader = Reader(memory, "t")
        settle(reader)
        memory.fail_by_chance("commit", KafkaError.REQUEST_TIMED_OUT, 0.5)
        found = [reader.commit(1) for _ in range(40)]
        memory.fail_by_chance("commit", KafkaError.REQUEST_TIMED_OUT, 0)
        assert reader.commit(1) is None
        return found

    assert outcomes(1) == outcomes(1)
    assert {*outcomes(1)} == {None, "REQUEST_TIMED_OUT"}


def test_an_unknown_operation_is_refused(memory: TestBroker) -> None:
    with pytest.raises(ValueError, match="comit"):
        memory.fail("comit", KafkaError.REQUEST_TIMED_OUT)
