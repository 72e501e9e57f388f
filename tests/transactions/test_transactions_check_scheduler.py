"""What a coordinator asks, and when: under load, by the broker's clock, of the discard policy, and of nobody."""

from __future__ import annotations

import time
from typing import Any

import pytest
from confluent_kafka import TopicPartition
from half_partition import half_partition, half_record, op_record
from transaction_tools import INTERVAL_S, Bench, closing_consumer

from penstock.transactions import HalfMessage, TransactionState
from penstock.transactions.coordinator.checks.check_scheduler import WINDOW, CheckScheduler
from penstock.transactions.coordinator.checks.check_sender import SendOutcome
from penstock.transactions.coordinator.checks.discard_policy import Discarding
from penstock.transactions.coordinator.partitions.counts import Counts
from penstock.transactions.coordinator.partitions.half_partition import HalfPartition
from penstock.transactions.coordinator.state.check_schedule import CheckPolicy
from penstock.transactions.coordinator.state.pending.pending import Pending
from penstock.transactions.coordinator.state.snapshot import LARGEST_BYTES, pinning
from penstock.transactions.rationed_log import RationedLog
from penstock.transactions.wire.half import Half
from penstock.transactions.wire.ids import NO_ID, new_id
from penstock.transactions.wire.ops import Author, Op, Verdict
from waiting import wait_until

#: The broker's time at the beginning of a test, in seconds; nobody else's clock says so.
BIRTH_S = 5_000.0


class Asking:
    """Takes questions and decisions, and tells whether a group is there."""

    def __init__(self) -> None:
        self.checked: list[tuple[float, str]] = []
        self.decided: list[tuple[str, Verdict]] = []
        self.ticks: list[int] = []
        self.looked = 0
        self.answers: dict[str, SendOutcome] = {}

    def check(self, partition: HalfPartition, pending: Pending, now: float) -> SendOutcome:
        assert partition.number == 0
        self.looked += 1
        asked = self.answers.get(pending.half.group, SendOutcome.SENT)
        if asked is SendOutcome.SENT:
            self.checked.append((now, pending.half.transaction_id))
            pending.requested = pending.check_count + 1
        return asked

    def decide(self, half_partition: int, pending: Pending, verdict: Verdict) -> None:
        assert half_partition == 0
        self.decided.append((pending.half.transaction_id, verdict))

    def tick(self, half_partition: int) -> None:
        self.ticks.append(half_partition)


class Room:
    """A partition, and a coordinator that asks about it; a test moves the time."""

    def __init__(self, policy: CheckPolicy | None = None) -> None:
        self.counts, self.ration, self.asking = Counts(), RationedLog(), Asking()
        policy = policy or CheckPolicy(6, 30, 15)
        self.partition = half_partition(counts=self.counts, policy=policy, log=self.ration)
        self.scheduler = CheckScheduler(
            policy=policy,
            sender=self.asking,  # type: ignore[arg-type] # what is used of it
            discarding=Discarding("topic", 30, "test"),
            half_end=lambda _: 0,
            counts=self.counts,
            ration=self.ration,
        )
        self.halves = self.ops = 0
        # As if it had marked the op log when it took the partition over.
        self.partition.ticked_at = 0.0

    def half(self, at: float, group: str = "orders", value: bytes = b"v", **more: Any) -> Half:
        """Store a half when the test is `at` seconds old."""
        half = Half(new_id(), group, "topic", None, None, value, (), None, **more)
        self.partition.feed.half(half_record(self.halves, half, BIRTH_S + at), at)
        self.halves += 1
        return half

    def op(self, op: Op, at: float, read_at: float | None = None) -> None:
        self.partition.feed.op(op_record(self.ops, op, BIRTH_S + at), at if read_at is None else read_at)
        self.ops += 1

    def tick(self, at: float, read_at: float | None = None) -> None:
        self.op(Op(NO_ID, Verdict.TICK, Author.COORDINATOR, "c", 0, (), 0), at, read_at)

    def run(self, at: float) -> int:
        """Ask, and return how many checks were sent."""
        before = len(self.asking.checked)
        self.partition.note_progress(at)
        self.scheduler.run(self.partition, at)
        return len(self.asking.checked) - before


def commit(half: Half, offset: int) -> Op:
    return Op(half.transaction_id, Verdict.COMMIT, Author.PRODUCER, half.group, 0, (offset,), 0)


def test_a_check_waits_until_all_that_was_decided_before_it_was_due_is_read() -> None:
    room = Room()
    late = room.half(0.0)

    assert room.run(5.9) == 0
    assert room.asking.ticks == []
    assert room.run(6.7) == 0
    assert room.asking.ticks == [0], "nothing tells how far the op log goes: it is marked"
    room.op(commit(late, 0), 5.0, read_at=6.8)
    room.tick(6.7, read_at=6.8)

    assert room.run(6.9) == 0, "it was decided meanwhile"


def test_an_undecided_half_is_asked_about_when_the_mark_is_read_back() -> None:
    room = Room()
    room.half(0.0)

    room.run(6.7)
    room.tick(6.7, read_at=6.8)

    assert room.run(6.9) == 1
    assert room.run(36.0) == 0
    room.tick(37.0)
    assert room.run(37.1) == 1


def test_checks_come_under_steady_load_without_a_mark() -> None:
    room = Room()
    room.half(0.0)
    sent = 0

    for step in range(1, 80):
        at = step / 10
        decided = room.half(at)
        room.op(commit(decided, room.halves - 1), at)
        sent += room.run(at)

    assert sent == 1
    assert room.asking.ticks == []


@pytest.mark.parametrize("off_s", [-3600.0, 3600.0])
def test_a_coordinator_whose_clock_is_an_hour_off_checks_neither_early_nor_late(
    off_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    wall = time.time
    monkeypatch.setattr(time, "time", lambda: wall() + off_s)
    room = Room()
    room.half(0.0)

    room.tick(5.9)
    assert room.run(5.9) == 0
    room.tick(6.0)
    assert room.run(6.0) == 1


def test_after_a_restart_the_mark_tells_how_old_halves_are() -> None:
    room = Room()
    room.partition.ticked_at = float("-inf")
    # It was stored 600 s ago by the broker's clock; this coordinator has just started, at its second 0.
    old = half_record(0, Half(new_id(), "g", "topic", None, None, b"v", (), None), BIRTH_S - 600)
    room.partition.feed.half(old, 0.0)

    assert room.run(0.1) == 0
    assert room.asking.ticks == [0]
    room.tick(0.1)
    assert room.run(0.2) == 1


def test_a_dead_group_costs_one_question_for_all_its_halves_and_delays_no_other() -> None:
    room = Room()
    for _ in range(5_000):
        room.half(0.0, group="dead")
    room.half(0.0, group="alive")
    room.asking.answers["dead"] = SendOutcome.NOBODY
    room.tick(7.0)

    assert room.run(7.0) == 1
    assert room.asking.looked == 2
    assert room.counts.no_producer == 5_000
    assert room.run(7.1) == 0
    assert room.asking.looked == 2
    room.tick(37.1)
    room.asking.answers.clear()
    assert room.run(37.1) == WINDOW + 1, "who is back is asked, in portions"


def test_exhausted_halves_of_a_dead_group_are_discarded() -> None:
    room = Room(CheckPolicy(6, 30, 1))
    exhausted, other = room.half(0.0), room.half(0.0)
    room.partition.state.pending[exhausted.transaction_id].check_count = 1
    room.asking.answers["orders"] = SendOutcome.NOBODY
    room.tick(7.0)

    room.run(7.0)

    assert room.asking.decided == [(exhausted.transaction_id, Verdict.DISCARD)]
    assert room.asking.looked == 1
    assert other.transaction_id in room.partition.state.pending


def test_an_incomplete_transaction_is_rolled_back_by_time_and_one_that_becomes_complete_is_checked() -> None:
    room = Room(CheckPolicy(6, 30, 15, incomplete_s=60))
    lost, whole = room.half(0.0, part=(1, 2)), room.half(0.0, part=(1, 2))
    second = half_record(2, whole._replace(part=(2, 2)), BIRTH_S + 1)
    room.partition.feed.half(second, 1.0)
    room.tick(7.0)

    assert room.run(7.0) == 1
    assert room.asking.checked[0][1] == whole.transaction_id
    assert room.asking.decided == []
    room.half(61.0)
    room.tick(61.0)
    room.run(61.0)
    assert room.asking.decided == [(lost.transaction_id, Verdict.ROLLBACK)]


def test_a_decision_read_again_after_a_restart_is_not_a_refusal() -> None:
    room = Room()
    first, held = room.half(0.0), room.half(0.0)
    room.op(commit(held, 1), 0.1)
    room.op(commit(first, 0), 0.2)
    batch = room.partition.state.next_batch(10, lambda pending: None if pending.offset == 0 else "topic")
    assert batch is not None
    assert (batch.half_checkpoint, batch.op_checkpoint) == (1, 0), "what is held keeps its op"

    again = Room()
    again.partition.state.half_position = 1
    again.partition.state.remember(batch.notes())
    record = half_record(1, held, BIRTH_S)
    again.partition.feed.half(record, 0.0)
    again.op(commit(held, 1), 0.1)
    again.op(commit(first, 0), 0.2)

    assert again.counts.refused == 0
    again.op(commit(first, 0), 0.3)
    assert again.counts.refused == 1


def test_records_that_were_deleted_unread_are_counted_and_told(caplog: pytest.LogCaptureFixture) -> None:
    room = Room()
    room.half(0.0)
    room.halves = 5
    room.half(0.1)
    room.ops = 2
    room.tick(0.2)

    now = room.counts.statistics(lambda: [room.partition.reading(0.0)])

    assert now.lost == 6
    assert "half partition 0: records 1 to 4 were deleted" in caplog.text


def test_a_transaction_too_large_to_be_carried_that_holds_the_logs_is_named_now_and_then(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.transactions.coordinator.state.snapshot.GAP", 10)
    small, room = Room(), Room()
    small.half(at=0)
    large = room.half(at=0, value=b"x" * LARGEST_BYTES)
    room.partition.state.skip_half(9)
    room.run(at=1)
    assert large.transaction_id not in caplog.text
    for one in (small, room):
        one.partition.state.skip_half(50)

    for at in (50, 60, 70):
        room.run(at=at)
    (said,) = [one.getMessage() for one in caplog.records if large.transaction_id in one.getMessage()]
    assert "holds partition 0 of the half and op logs at offset 0, 51 records below the end" in said
    assert "penstock tx show" in said
    room.run(at=50 + 601)
    assert len([one for one in caplog.records if large.transaction_id in one.getMessage()]) == 2
    # One that is small is snapshotted, and holds nothing.
    assert pinning(small.partition.state) is None


def test_finish_times_are_counted_from_birth_by_the_brokers_clock() -> None:
    room = Room()
    room.op(commit(room.half(0.0), 0), 0.5)
    batch = room.partition.next_batch(10, lambda _: None, 1 << 30)
    assert batch is not None
    room.partition.clock.saw(int((BIRTH_S + 100_000) * 1000), time.monotonic())

    room.partition.settled(batch)

    now = room.counts.statistics(lambda: [room.partition.reading(0.0)])
    assert (now.committed, now.finish_times[-1], sum(now.finish_times)) == (1, 1, 1)
    assert now.finish_seconds >= 99_000


def test_an_idle_coordinator_writes_positions_down_that_only_marks_have_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.transactions.coordinator.partitions.half_partition._IDLE_S", 0.0)
    room = Room()
    room.half(0.0)
    room.tick(1.0)
    room.partition.note_progress(1.0)

    batch = room.partition.next_batch(10, lambda _: None, 1 << 30)

    assert batch is not None
    assert (batch.decided, batch.half_checkpoint, batch.op_checkpoint) == ([], 0, 1)
    room.partition.settled(batch)
    assert room.partition.next_batch(10, lambda _: None, 1 << 30) is None


def test_what_is_pending_for_long_lets_the_logs_be_trimmed_and_survives_a_restart(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.transactions.coordinator.partitions.half_partition.GAP", 50)
    monkeypatch.setattr("penstock.transactions.coordinator.partitions.log_upkeep.UPKEEP_S", INTERVAL_S)
    asked: list[str] = []

    def answer(half: HalfMessage) -> TransactionState:
        asked.append(half.transaction_id)
        return TransactionState.COMMIT

    producer = bench.producer(order="half", check=None)
    quick = bench.producer("quick")
    coordinator = bench.coordinator(transaction_timeout=5.0)
    with producer.transaction(bench.topic, key="old", value="first") as tx:
        tx.unknown()
    producer.send(bench.topic, key="old", value="second")
    for number in range(600):
        quick.submit(bench.topic, key=b"%d" % number, value=b"v")
    bench.counted(coordinator, committed=600)

    old_one = TopicPartition(bench.topics.half, bench.topics.half_partition(b"old"))
    with closing_consumer(bench.servers, "read_committed") as consumer:
        wait_until(lambda: consumer.get_watermark_offsets(old_one, 10)[0] > 50, 60)
    assert coordinator.statistics().pending == 2
    coordinator.stop()
    bench.producer(order="half", check=answer)
    again = bench.coordinator(transaction_timeout=5.0)
    assert bench.settled(again, committed=2).lost == 0

    old = [value for key, value in bench.visible() if key == b"old"]
    assert old == [b"first", b"second"]
    assert len(bench.visible()) == 602
    assert len(set(asked)) == 1


def test_a_crowd_is_asked_about_as_fast_as_it_is_answered_and_no_faster() -> None:
    room = Room(CheckPolicy(6, 30, 15))
    halves = [room.half(0) for _ in range(3 * WINDOW)]
    others = [room.half(0, group="others") for _ in range(2)]
    room.tick(7)

    assert room.run(7) == WINDOW + 2, "one group's crowd takes no other's turn"
    assert {other.transaction_id for other in others} <= {name for _, name in room.asking.checked}
    room.tick(8)
    assert room.run(8) == 0
    # One is answered UNKNOWN, nine are decided, and the others are not heard of.
    asked = {name for _, name in room.asking.checked}
    answered = [at for at, half in enumerate(halves) if half.transaction_id in asked][:10]
    first = halves[answered[0]]
    room.op(Op(first.transaction_id, Verdict.UNKNOWN, Author.CHECK, "orders", 0, (answered[0],), 1), 9)
    for at in answered[1:]:
        room.op(commit(halves[at], at), 9)
    room.tick(10)
    assert room.run(10) == 10
    # What was not answered for an interval is given up, and asked again in its turn.
    room.tick(40)
    assert room.run(40) == WINDOW + 2
