"""A half partition in a coordinator's hands, without Kafka."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from penstock.transactions.broker_clock import BrokerClock
from penstock.transactions.checks import CheckPolicy
from penstock.transactions.ids import new_id
from penstock.transactions.owned import Counts, OwnedPartition
from penstock.transactions.rationed_log import RationedLog
from penstock.transactions.records import Author, Half, Op, Verdict, encode_half, encode_op
from penstock.transactions.reloading import Reader
from penstock.transactions.takeover import Inheritance


@dataclass(frozen=True)
class Fetched:
    """A record as the client hands it over."""

    place: int
    content: bytes | None
    named: list[tuple[str, bytes | None]] = field(default_factory=list)
    name: bytes | None = None

    def offset(self) -> int:
        return self.place

    def key(self) -> bytes | None:
        return self.name

    def value(self) -> bytes | None:
        return self.content

    def headers(self) -> list[tuple[str, bytes | None]]:
        return self.named

    def timestamp(self) -> tuple[int, int]:
        return 1, int(time.time() * 1000)


def taken_over(counts: Counts, inheritance: Inheritance, reader: Reader | None = None) -> OwnedPartition:
    return OwnedPartition(
        0,
        inheritance,
        policy=CheckPolicy(6, 30, 15),
        counts=counts,
        log=RationedLog(),
        may_publish_to=lambda _: True,
        clock=BrokerClock(),
        reader=reader,
    )


def test_a_partition_counts_as_taken_over_only_when_all_that_was_in_its_logs_is_read() -> None:
    counts = Counts()
    owned = taken_over(counts, Inheritance(5, 3, half_end=7, op_end=4, notes=[], done_end=0))
    half = Half(new_id(), "orders", "topic", None, None, b"v", (), None)
    other = half._replace(transaction_id=new_id())
    op = Op(half.transaction_id, Verdict.UNKNOWN, Author.CHECK, "orders", 0, (5,), 1)
    seen = []

    def look() -> None:
        owned.note_progress(0.0)
        now = counts.statistics([owned])
        seen.append((now.partitions, now.pending))

    look()
    owned.feed_half(Fetched(5, b"v", encode_half(half)), 0.0)  # type: ignore[arg-type] # what is used of it
    look()
    owned.feed_op(Fetched(3, encode_op(op)), 0.0)  # type: ignore[arg-type] # what is used of it
    look()
    owned.feed_half(Fetched(6, b"v", encode_half(other)), 0.0)  # type: ignore[arg-type] # what is used of it
    look()

    assert seen == [(0, 0), (0, 1), (0, 1), (1, 2)]


def test_a_partition_whose_logs_are_empty_is_taken_over_at_once() -> None:
    counts = Counts()
    owned = taken_over(counts, Inheritance(5, 3, half_end=5, op_end=3, notes=[], done_end=0))

    owned.note_progress(0.0)

    assert counts.statistics([owned]).partitions == 1


def decided_in_order(owned: OwnedPartition) -> list[str]:
    return list(owned.settlement.decided)


def test_decisions_fetched_before_their_halves_take_effect_in_their_own_order() -> None:
    owned = taken_over(Counts(), Inheritance(0, 0, half_end=0, op_end=0, notes=[], done_end=0))
    halves = [Half(new_id(), "orders", "topic", None, None, b"v", (), None) for _ in range(3)]
    for place, number in enumerate((2, 1, 0)):
        op = Op(halves[number].transaction_id, Verdict.COMMIT, Author.PRODUCER, "orders", 0, (number,), 0)
        owned.feed_op(Fetched(place, encode_op(op)), 0.0)  # type: ignore[arg-type] # what is used of it
    owned.note_progress(0.0)
    assert owned.waits_for_halves

    for number, half in enumerate(halves):
        owned.feed_half(Fetched(number, b"v", encode_half(half)), 0.1)  # type: ignore[arg-type] # what is used of it
        owned.note_progress(0.1)

    assert not owned.waits_for_halves
    assert decided_in_order(owned) == [half.transaction_id for half in reversed(halves)]
    assert owned.settlement.op_position == 3


def test_decisions_wait_for_a_half_however_long_its_log_is_not_read() -> None:
    owned = taken_over(Counts(), Inheritance(0, 0, half_end=0, op_end=0, notes=[], done_end=0))
    halves = [Half(new_id(), "orders", "topic", None, b"k", b"v", (), None) for _ in range(2)]
    owned.feed_half(Fetched(0, b"v", encode_half(halves[0])), 0.0)  # type: ignore[arg-type] # what is used of it
    for place, number in enumerate((1, 0)):
        op = Op(halves[number].transaction_id, Verdict.COMMIT, Author.PRODUCER, "orders", 0, (number,), 0)
        owned.feed_op(Fetched(place, encode_op(op)), 1.0)  # type: ignore[arg-type] # what is used of it

    # What was asked for before the decision was read tells nothing of its half.
    owned.learn_half_end(1, asked=0.9)
    for now in (2.0, 4.0, 60.0):
        owned.note_progress(now)
        assert owned.wants_look(now)
        assert decided_in_order(owned) == []
    # It is there; how long reading it takes does not matter.
    owned.learn_half_end(2, asked=60.0)
    owned.note_progress(100.0)
    assert decided_in_order(owned) == []
    assert not owned.wants_look(100.0)

    owned.feed_half(Fetched(1, b"v", encode_half(halves[1])), 100.0)  # type: ignore[arg-type] # what is used of it
    owned.note_progress(100.0)

    assert decided_in_order(owned) == [halves[1].transaction_id, halves[0].transaction_id]


def test_a_decision_for_a_half_that_cannot_come_holds_others_up_only_until_the_end_of_the_half_log_is_known() -> None:
    counts = Counts()
    owned = taken_over(counts, Inheritance(0, 0, half_end=0, op_end=0, notes=[], done_end=0))
    half = Half(new_id(), "orders", "topic", None, None, b"v", (), None)
    owned.feed_half(Fetched(0, b"v", encode_half(half)), 0.0)  # type: ignore[arg-type] # what is used of it
    forged = Op(new_id(), Verdict.COMMIT, Author.PRODUCER, "orders", 0, (10**12,), 0)
    real = Op(half.transaction_id, Verdict.COMMIT, Author.PRODUCER, "orders", 0, (0,), 0)
    for place, record in enumerate((encode_op(forged), b"garbage", encode_op(real))):
        owned.feed_op(Fetched(place, record), 0.0)  # type: ignore[arg-type] # what is used of it

    owned.note_progress(0.9)
    assert decided_in_order(owned) == []
    assert owned.settlement.op_position == 0, "what waits would be read again after a restart"
    owned.learn_half_end(1, asked=0.9)
    owned.note_progress(1.0)

    assert decided_in_order(owned) == [half.transaction_id]
    assert counts.forged == 1
    assert owned.settlement.op_position == 3
