"""Transactions outside of the common ones, when they are tried, and how long a topic stays set aside: pure."""

from __future__ import annotations

import itertools
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest
from half_partition import half_partition, half_record, op_record

from penstock.clients.bounded_calls import LeftBehind
from penstock.transactions.core.quarantine import TargetQuarantine
from penstock.transactions.core.set_aside import SetAside
from penstock.transactions.publishing.engine import Engine
from penstock.transactions.publishing.group_commit import GroupCommit
from penstock.transactions.publishing.publisher import AbortedError
from penstock.transactions.publishing.publisher_slot import CommitResult
from penstock.transactions.wire.half import Half
from penstock.transactions.wire.ids import new_id
from penstock.transactions.wire.ops import Author, Op, Verdict


def leave_out(quarantine: TargetQuarantine, topic: str, now: float) -> None:
    """Report that a common transaction failed because of a topic."""
    quarantine.suspect(topic, "gone", now)
    quarantine.watch(topic, now)


def has_nothing(_: str) -> bool:
    return False


def test_a_dead_topic_is_tried_at_growing_intervals() -> None:
    quarantine = TargetQuarantine()
    leave_out(quarantine, "dead", 0.0)

    tries, now = [], 0.0
    while len(tries) < 9:
        if quarantine.next_topic(["dead"], now) is not None:
            assert quarantine.begin_try("dead", now) == 1
            tries.append(now)
            quarantine.end_try("dead")
            quarantine.fail("dead", "gone", now)
        now += 0.1

    pauses = [round(after - before, 1) for before, after in itertools.pairwise(tries)]
    assert pauses == sorted(pauses)
    assert 29 < pauses[-1] < 31


def test_a_topic_that_fails_again_when_it_is_back_stays_apart_for_longer_each_time() -> None:
    quarantine, now, apart_for = TargetQuarantine(), 0.0, list[float]()

    for number in range(8):
        begun = now
        leave_out(quarantine, "dead", now)
        now += 0.6
        quarantine.succeeded("dead", [f"{number}"], now)
        while quarantine.is_out("dead"):
            now += 0.5
            quarantine.release(has_nothing, (), now)
        apart_for.append(now - begun)

    assert apart_for == sorted(apart_for)
    assert apart_for[0] < 6
    assert 300 <= apart_for[-1] < 302


def test_a_topic_stays_apart_as_long_as_something_waits_for_it_that_was_not_refused() -> None:
    quarantine = TargetQuarantine()
    leave_out(quarantine, "dead", 0.0)
    quarantine.succeeded("dead", ["1"], 1.0)

    assert quarantine.release(lambda _: True, {"dead"}, 100.0) == []
    assert quarantine.release(has_nothing, {"dead"}, 100.0) == ["dead"]


def test_a_topic_that_took_nothing_is_not_said_to_do_so_any_more_once_nothing_waits_for_it() -> None:
    quarantine = TargetQuarantine()
    leave_out(quarantine, "deleted", 0.0)
    quarantine.fail("deleted", "does not exist", 0.0)

    assert quarantine.release(has_nothing, {"deleted"}, 100.0) == []
    assert quarantine.reasons() == {"deleted": "does not exist"}
    assert quarantine.release(has_nothing, (), 100.0) == ["deleted"]
    assert quarantine.reasons() == {}


def test_one_that_is_refused_again_and_again_does_not_keep_its_topic_apart() -> None:
    quarantine, now, tries, back_at = TargetQuarantine(), 0.0, 0, list[float]()
    assert quarantine.refuse("stuck", "sick", "too large", now)

    for _ in range(1_000):
        if quarantine.retries("sick", now):
            tries += 1
            assert not quarantine.refuse("stuck", "sick", "too large", now)
        back_at += [now for _ in quarantine.release(has_nothing, (), now)]
        now += 0.1

    assert 5 <= tries <= 10
    assert 4 < back_at[0] < 6
    assert len(back_at) == 1
    # It is tried alone still.
    assert quarantine.is_refused("stuck")


def test_what_is_refused_stays_set_aside_when_its_topic_is_released_and_holds_what_stands_behind_it() -> None:
    set_aside = SetAside()
    stuck, behind, other = (waiting(name, places) for name, places in (("1", (1,)), ("2", (1,)), ("3", (2,))))
    set_aside.add(stuck, "sick")
    set_aside.add(behind, None)
    set_aside.add(other, "sick")

    assert set_aside.release("sick", lambda one: one is stuck) == [other]

    assert [front.transaction_id for front in set_aside.fronts("sick")] == ["1"]
    assert behind.held
    assert set_aside.remove(stuck) == [behind]


def waiting(name: str, places: tuple[int, ...]) -> Any:
    return SimpleNamespace(
        transaction_id=name, places=places, topics=("sick",), sequence=name, held=False, in_flight=False
    )


class Slot:
    """A slot whose Kafka transactions end as a test says."""

    lost_ids, is_used, is_ready = 0, False, True

    def __init__(self, *, is_trial: bool) -> None:
        self.is_trial = is_trial
        self.begun: list[set[str]] = []
        self.commit: GroupCommit | None = None
        self.ended: AbortedError | None = None

    @property
    def is_in_flight(self) -> bool:
        return self.commit is not None

    def poll(self, _: float) -> None: ...

    def begin(self, commit: GroupCommit, _: object) -> None:
        self.commit = commit
        self.begun.append(set(commit.names()))

    def result(self, _: float) -> CommitResult | None:
        commit = self.commit
        if commit is None or self.ended is None:
            return None
        self.commit = None
        return CommitResult(commit, self.ended, 1.0)


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> float:
    """The second at which the monotonic clock stands, however long a test takes."""
    stands = time.monotonic()
    monkeypatch.setattr(time, "monotonic", lambda: stands)
    return stands


def engine_of(owned: Any, common: Slot, apart: Slot) -> Engine:
    """Return an engine whose targets are all there."""
    exists = {"counts": SimpleNamespace(get=lambda *_: 8), "has": lambda *_: True, "missing": lambda *_: None}
    targets: Any = SimpleNamespace(were_heard=True, look=lambda _: None, **exists)
    clients: Any = SimpleNamespace(targets=targets, left=LeftBehind("a test"), discarded="discarded")
    return Engine(owned, clients, lambda: None, 0.1, slots=cast("Any", [common, apart]))


def store_and_commit(partition: Any, *halves: Half) -> None:
    """Have the halves of a transaction, and the decision to commit it, read from the logs."""
    first, state = partition.state.half_position, partition.state
    for offset, half in enumerate(halves, first):
        partition.feed.take_half(half_record(offset, half), 0.0)
    offsets = tuple(range(first, state.half_position))
    op = Op(halves[0].transaction_id, Verdict.COMMIT, Author.PRODUCER, "orders", 0, offsets, 0)
    partition.feed.take_op(op_record(state.op_position, op), 0.0)


def test_a_marker_that_came_too_late_once_is_no_reason_once_another_came_in_time() -> None:
    common, apart = Slot(is_trial=False), Slot(is_trial=True)
    common.is_ready = False
    backlog = SimpleNamespace(queue=SimpleNamespace(all=()), set_aside=SimpleNamespace(topics={"sick"}.copy))
    engine, slot = engine_of({0: backlog}, common, apart), cast("Any", apart)
    engine.quarantine.refuse("1", "sick", "too large", 0.0)

    # The broker took long to end the transaction of the first try, and ended that of the second at once.
    engine._tried[slot] = "sick", 0
    apart.lost_ids, apart.is_ready = 1, False
    engine.begin(0.0)
    assert "cannot end" in engine.quarantine.reasons()["sick"]
    engine._tried[slot] = "sick", 1
    apart.is_ready = True
    engine.quarantine.begin_try("sick", 0.0)  # nothing more is tried meanwhile
    engine.begin(1.0)

    assert engine.quarantine.reasons() == {}
    assert engine.quarantine.is_refused("1")


def test_what_is_tried_does_not_pass_what_a_common_transaction_gave_back_while_none_can_begin(now: float) -> None:
    partition, common, apart = half_partition(), Slot(is_trial=False), Slot(is_trial=True)
    engine = engine_of({0: partition}, common, apart)
    leave_out(engine.quarantine, "sick", 0.0)
    first = Half(new_id(), "orders", "well", None, b"k", b"1", (), None)
    parts = [first._replace(transaction_id=new_id(), part=(1, 2)), first._replace(topic="sick", part=(2, 2))]
    both = [parts[0], parts[1]._replace(transaction_id=parts[0].transaction_id)]
    store_and_commit(partition, first)
    store_and_commit(partition, *both)

    engine.begin(now)
    common.ended = AbortedError("too slow", targets={"well": "too slow"})
    common.is_ready = False
    engine.take_result()
    engine.begin(now + 1)

    assert common.begun == [{first.transaction_id}]
    assert apart.begun == [], "the later one of the key waits for the earlier"
    common.is_ready = True
    engine.begin(now + 2)
    assert apart.begun == [{first.transaction_id}]


def test_what_waits_for_the_common_transaction_keeps_no_other_topic_from_its_trial(now: float) -> None:
    partition, common, apart = half_partition(), Slot(is_trial=False), Slot(is_trial=True)
    engine = engine_of({0: partition}, common, apart)
    leave_out(engine.quarantine, "sick", now - 1)
    leave_out(engine.quarantine, "dead", now)
    first, both, other = (Half(new_id(), "orders", "well", None, b"k", b"1", (), None) for _ in range(3))
    store_and_commit(partition, first)
    store_and_commit(partition, both._replace(part=(1, 2)), both._replace(topic="sick", part=(2, 2)))
    store_and_commit(partition, other._replace(topic="dead"))

    engine.begin(now)

    assert common.begun == [{first.transaction_id}]
    assert apart.begun == [{other.transaction_id}]


def test_what_was_refused_is_tried_again_while_others_go_to_its_topic(now: float) -> None:
    partition, common, apart = half_partition(), Slot(is_trial=False), Slot(is_trial=True)
    engine = engine_of({0: partition}, common, apart)
    refused, other = (Half(new_id(), "orders", "busy", None, key, b"1", (), None) for key in (b"k", b"l"))
    engine.quarantine.refuse(refused.transaction_id, "busy", "too large", now - 100)
    store_and_commit(partition, refused)
    apart.is_ready = False
    engine.begin(now)
    engine._trials.release(now + 1)
    assert not engine.quarantine.is_out("busy")

    store_and_commit(partition, other)
    apart.is_ready = True
    engine.begin(now + 1)

    assert common.begun == [{other.transaction_id}]
    assert apart.begun == [{refused.transaction_id}]


def test_a_discard_that_its_topic_does_not_take_lets_the_commit_before_it_in_its_line_go_alone() -> None:
    partition = half_partition()
    first = Half(new_id(), "orders", "well", None, b"k", b"1", (), None, order_key=b"k")
    halves = [first, first._replace(transaction_id=new_id())]
    for at, (half, verdict) in enumerate(zip(halves, (Verdict.COMMIT, Verdict.DISCARD), strict=True)):
        partition.feed.take_half(half_record(at, half), 0.0)
        op = Op(half.transaction_id, verdict, Author.OPERATOR, "orders", 0, (at,), 0)
        partition.feed.take_op(op_record(at, op), 0.0)

    batch = partition.next_batch(10, lambda pending: "gone" if pending.verdict is Verdict.DISCARD else None, 10**6)

    assert batch is not None
    assert [pending.half.transaction_id for pending in batch.decided] == [first.transaction_id]
