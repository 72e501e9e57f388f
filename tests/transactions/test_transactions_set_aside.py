"""What is set aside, what must stay behind it, and when it is tried again: pure."""

from __future__ import annotations

from penstock.transactions.coordinator.state.pending.pending import Pending
from penstock.transactions.coordinator.state.pending.ready_queue import ReadyQueue
from penstock.transactions.wire.half import Half
from penstock.transactions.wire.ids import new_id
from penstock.transactions.wire.ops import Verdict
from penstock.transactions.writing.target_quarantine import TargetQuarantine


def pending(number: int, *places: tuple[str, bytes | None]) -> Pending:
    """Return a transaction that was committed as that number, of a message to each topic and key."""
    name = new_id()
    count = len(places)
    halves = [
        Half(name, "orders", topic, None, key, b"v", (), None, part=(n, count) if count > 1 else None)
        for n, (topic, key) in enumerate(places, 1)
    ]
    made = Pending(halves[0], 10 * number)
    for offset, half in enumerate(halves[1:], start=10 * number + 1):
        made.add_part(offset, half)
    made.verdict, made.decided_at = Verdict.COMMIT, number
    return made


def test_later_ones_of_a_key_and_target_stay_behind_and_no_others() -> None:
    decisions = ReadyQueue()
    first, second, other_key, other_topic, keyless = (
        pending(0, ("sick", b"a")),
        pending(1, ("sick", b"a")),
        pending(2, ("sick", b"b")),
        pending(3, ("well", b"a")),
        pending(4, ("sick", None)),
    )
    for one in (first, second, other_key, other_topic, keyless):
        decisions.add(one)

    chosen = decisions.choose(10, lambda one: "sick" if one is first else None, 1 << 20)

    assert list(chosen.values()) == [other_key, other_topic, keyless]
    assert decisions.set_aside.behind(second) is first
    assert decisions.set_aside.take("sick", 10, lambda _: False) == [first, second]
    assert decisions.set_aside.take("sick", 10, lambda one: one is second) == [first]


def test_who_stands_behind_several_goes_when_all_of_them_have_gone() -> None:
    decisions = ReadyQueue()
    one, two = pending(0, ("sick", b"a")), pending(1, ("ill", b"b"))
    both, last = pending(2, ("sick", b"a"), ("ill", b"b")), pending(3, ("ill", b"b"))
    for each in (one, two, both, last):
        decisions.add(each)
    assert not decisions.choose(10, lambda p: p.half.topic if p in {one, two} else None, 1 << 20)

    decisions.forget(one)
    assert not decisions.choose(10, lambda _: None, 1 << 20)
    decisions.forget(two)

    assert list(decisions.choose(10, lambda _: None, 1 << 20).values()) == [both, last]
    assert not decisions.set_aside


def test_what_is_let_go_goes_before_what_was_decided_later() -> None:
    decisions = ReadyQueue()
    held = [pending(number, ("sick", b"a" if number % 2 else None)) for number in range(4)]
    for one in held:
        decisions.add(one)
    decisions.choose(10, lambda _: "sick", 1 << 20)
    assert len(decisions.set_aside) == 4
    later = pending(9, ("well", b"a"))
    decisions.add(later)

    decisions.release("sick")

    assert list(decisions.choose(10, lambda _: None, 1 << 20).values()) == [*held, later]


def test_a_topic_that_takes_nothing_is_tried_after_pauses_that_grow_to_half_a_minute() -> None:
    quarantine, now, pauses = TargetQuarantine(), 0.0, []

    for _ in range(9):
        assert quarantine.next_topic(["dead"], now) == "dead"
        assert quarantine.begin_try("dead", now) == 1 or not pauses
        quarantine.end_try("dead")
        pauses.append(quarantine.fail("dead", "gone", now))
        assert quarantine.next_topic(["dead"], now) is None
        now += pauses[-1]

    assert pauses == [0.5, 1, 2, 4, 8, 16, 30, 30, 30]
    assert quarantine.reasons() == {"dead": "gone"}


def test_refused_ones_are_tried_one_at_a_time_whatever_their_number_and_the_topic_stays_apart_for_a_while() -> None:
    quarantine, tries = TargetQuarantine(), 0
    for number in range(1_000):
        quarantine.refuse(f"{number}", "narrow", "too large", 0.0, too_large=5_000)
    assert quarantine.is_too_large("narrow", 6_000)
    assert not quarantine.is_too_large("narrow", 100)

    now = 0.0
    while now < 300:
        if quarantine.retries("narrow", now):
            tries += 1
            quarantine.refuse("1", "narrow", "too large", now, too_large=5_000)
        now += 0.1

    assert tries < 20
    assert quarantine.is_out("narrow")
    quarantine.succeeded("narrow", ["1"], now)
    assert quarantine.refusals() == {}
    assert not quarantine.is_too_large("narrow", 6_000)
