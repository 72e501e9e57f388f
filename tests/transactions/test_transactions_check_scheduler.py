"""The checks of a coordinator, and their times: by the broker's clock, with many producers and with none."""

from __future__ import annotations

import time
from typing import Any

import pytest
from half_partition import context_of, half_partition, half_record, op_record

from penstock.transactions.core.check_plan import WINDOW, CheckPolicy
from penstock.transactions.core.discard import Discarding
from penstock.transactions.core.pending import Pending
from penstock.transactions.operator.administration import NO_ANSWER, NO_PRODUCER
from penstock.transactions.stores.kafka.coordinator.checks import CheckScheduler
from penstock.transactions.wire.half import Half
from penstock.transactions.wire.ids import NO_ID, new_id
from penstock.transactions.wire.ops import Author, Op, Verdict
from penstock.transactions.wire.topics import StoreTopics

#: The broker's time at the beginning of a test, in seconds; nobody else's clock says so.
BIRTH_S = 5_000.0


class Asking:
    """Takes checks and decisions, and says whether a group lives."""

    def __init__(self) -> None:
        self.checked: list[str] = []
        self.decided: list[tuple[str, Verdict]] = []
        self.ticks: list[int] = []
        self.looked = 0
        #: What keeps groups from being asked.
        self.hindrances: dict[str, str] = {}

    def hindrance(self, group: str, _now: float) -> str | None:
        self.looked += 1
        return self.hindrances.get(group)

    def ask(self, half_partition: int, pending: Pending) -> bool:
        assert half_partition == 0
        self.checked.append(pending.half.transaction_id)
        pending.requested = pending.check_count + 1
        return True

    def decide(self, half_partition: int, pending: Pending, verdict: Verdict) -> None:
        assert half_partition == 0
        self.decided.append((pending.half.transaction_id, verdict))

    def tick(self, half_partition: int) -> None:
        self.ticks.append(half_partition)


class Room:
    """A partition, and a coordinator that asks about it; a test moves the time."""

    def __init__(self, policy: CheckPolicy | None = None) -> None:
        context = context_of(StoreTopics("store", 1), policy=policy)
        self.counts, self.asking = context.counts, Asking()
        self.partition = half_partition(context=context)
        discarding = Discarding("topic", 30, "test")
        self.scheduler = CheckScheduler(context, self.asking, self.asking, discarding)  # type: ignore[arg-type] # what is used
        self.halves = self.ops = 0
        # As if it had marked the op log when it took the partition over.
        self.partition.ticked_at = 0.0

    def half(self, at: float, group: str = "orders", value: bytes = b"v", **more: Any) -> Half:
        """Store a half when the test is `at` seconds old."""
        half = Half(new_id(), group, "topic", None, None, value, (), None, **more)
        self.partition.feed.take_half(half_record(self.halves, half, BIRTH_S + at), at)
        self.halves += 1
        return half

    def op(self, op: Op, at: float, read_at: float | None = None) -> None:
        self.partition.feed.take_op(op_record(self.ops, op, BIRTH_S + at), at if read_at is None else read_at)
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
    room.partition.feed.take_half(old, 0.0)

    assert room.run(0.1) == 0
    assert room.asking.ticks == [0]
    room.tick(0.1)
    assert room.run(0.2) == 1


def test_a_dead_group_costs_one_question_for_all_its_halves_and_delays_no_other() -> None:
    room = Room()
    for _ in range(5_000):
        room.half(0.0, group="dead")
    room.half(0.0, group="alive")
    room.asking.hindrances["dead"] = NO_PRODUCER.format("dead")
    room.tick(7.0)

    assert room.run(7.0) == 1
    assert room.asking.looked == 2
    assert room.counts.no_producer == 5_000
    assert room.scheduler.unasked({0: room.partition}) == {"dead": "a producer of group dead: none runs"}
    assert room.run(7.1) == 0
    assert room.asking.looked == 2
    room.tick(37.1)
    room.asking.hindrances.clear()
    assert room.run(37.1) == WINDOW + 1, "who is back is asked, in portions"
    assert room.scheduler.unasked({0: room.partition}) == {}


def test_a_group_with_unknown_liveness_is_counted_until_its_transactions_are_decided() -> None:
    room = Room()
    half = room.half(0.0, group="shop")
    room.asking.hindrances["shop"] = NO_ANSWER.format("shop")
    room.tick(7.0)
    room.run(7.0)

    waits = {"shop": "an answer of group shop: the brokers did not say whether one of its producers runs"}
    assert (room.counts.no_producer, room.scheduler.unasked({0: room.partition})) == (1, waits)
    room.op(commit(half, 0), 8.0)
    assert room.scheduler.unasked({0: room.partition}) == {}


def test_a_crowd_is_asked_about_as_fast_as_it_is_answered_and_no_faster() -> None:
    room = Room(CheckPolicy(6, 30, 15))
    halves = [room.half(0) for _ in range(3 * WINDOW)]
    others = [room.half(0, group="others") for _ in range(2)]
    room.tick(7)

    assert room.run(7) == WINDOW + 2, "one group's crowd takes no other's turn"
    assert {other.transaction_id for other in others} <= set(room.asking.checked)
    room.tick(8)
    assert room.run(8) == 0
    # One is answered UNKNOWN, nine are decided, and the others are not heard of.
    asked = set(room.asking.checked)
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
