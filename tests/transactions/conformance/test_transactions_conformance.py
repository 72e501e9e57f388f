"""One suite for every store: the rows of the design's table, and the scenarios that a store decides."""

from __future__ import annotations

import threading
import time
from collections import Counter

import pytest
from conformance.store_cases import INTERVAL_S, TIMEOUT_S, StoreBench, counted, settled

from penstock.transactions import new_id
from penstock.transactions.records import CheckRequest, Verdict
from penstock.transactions.store import Prepared

COMMIT, ROLLBACK, UNKNOWN = Verdict.COMMIT, Verdict.ROLLBACK, Verdict.UNKNOWN
#: A coordinator that asks nobody during the test.
NO_CHECKS = {"transaction_timeout_s": 600.0}


def test_what_commits_is_visible_once_with_its_key_and_headers(store_bench: StoreBench) -> None:
    settler = store_bench.settler(**NO_CHECKS)
    half = store_bench.half(b"v", key=b"k", headers=(("a", b"1"), ("none", None)))

    prepared = store_bench.prepare(half)
    assert store_bench.seen() == []
    store_bench.decide(prepared, COMMIT)
    settled(settler, committed=1)

    (message,) = store_bench.messages()
    assert (message.key(), message.value(), message.headers()) == (b"k", b"v", [("a", b"1"), ("none", None)])


def test_what_rolls_back_is_never_visible(store_bench: StoreBench) -> None:
    settler = store_bench.settler(**NO_CHECKS)

    store_bench.send(ROLLBACK, store_bench.half())
    settled(settler, rolled_back=1)

    assert store_bench.seen() == []


def test_what_is_undecided_is_settled_by_a_check(store_bench: StoreBench) -> None:
    settler = store_bench.settler()
    yes = store_bench.half(b"yes", key=b"k", headers=(("h", b"1"),))
    no = store_bench.half(b"no")

    with store_bench.answering(lambda request: COMMIT if request.half.value == b"yes" else ROLLBACK) as asked:
        store_bench.send(None, yes)
        store_bench.send(None, no)
        settled(settler, committed=1, rolled_back=1)

    assert {one.check_number for one in asked} == {1}
    assert next(one.half for one in asked if one.half.value == b"yes") == yes
    assert store_bench.seen() == [b"yes"]


def test_what_stays_unknown_is_discarded_after_exactly_15_answered_checks(store_bench: StoreBench) -> None:
    settler = store_bench.settler(check_interval_s=0.1, check_max=15)
    half = store_bench.half(b"v", key=b"k")

    with store_bench.answering(lambda _: UNKNOWN) as asked:
        store_bench.send(None, half)
        statistics = settled(settler, discarded=1)

    # One that is slow to be answered is asked again under its number, and counts once.
    assert {one.check_number for one in asked} == set(range(1, 16))
    assert (statistics.answered_checks, statistics.committed) == (15, 0)
    assert store_bench.seen() == []
    (discarded,) = store_bench.messages(store_bench.discarded)
    assert (discarded.key(), discarded.value()) == (b"k", b"v")
    headers = dict(discarded.headers())
    assert headers["penstock-tx"] == half.transaction_id.encode()
    assert headers["penstock-topic"] == store_bench.topic.encode()
    assert headers["penstock-reason"] == b"checks exhausted"


def test_120_messages_with_a_five_way_mix_of_outcomes(store_bench: StoreBench) -> None:
    settler = store_bench.settler(check_max=2)

    def answer(request: CheckRequest) -> Verdict:
        return (COMMIT, ROLLBACK, COMMIT, ROLLBACK, UNKNOWN)[int(request.half.value or b"") % 5]

    with store_bench.answering(answer):
        for number in range(120):
            verdict = (COMMIT, ROLLBACK, None, None, None)[number % 5]
            store_bench.send(verdict, store_bench.half(b"%d" % number, key=b"%d" % (number % 7)))
        statistics = settled(settler, committed=48, rolled_back=48, discarded=24)

    assert (statistics.committed, statistics.rolled_back, statistics.discarded) == (48, 48, 24)
    assert Counter(store_bench.seen()) == Counter(b"%d" % n for n in range(120) if n % 5 in (0, 2))
    assert Counter(store_bench.seen(store_bench.discarded)) == Counter(b"%d" % n for n in range(120) if n % 5 == 4)


@pytest.mark.parametrize("settled_first", [False, True], ids=["at once", "long after"])
def test_the_first_decision_stands_and_the_second_is_refused(store_bench: StoreBench, *, settled_first: bool) -> None:
    settler = store_bench.settler(**NO_CHECKS)
    cases = [(COMMIT, COMMIT), (ROLLBACK, COMMIT), (COMMIT, ROLLBACK), (ROLLBACK, ROLLBACK)]

    halves = [store_bench.half(b"%s then %s" % (a.name.encode(), b.name.encode())) for a, b in cases]
    prepared = [store_bench.send(first, half) for (first, _), half in zip(cases, halves, strict=True)]
    if settled_first:
        settled(settler, committed=2, rolled_back=2)
    for (_, second), one in zip(cases, prepared, strict=True):
        store_bench.decide(one, second)
    statistics = settled(settler, refused=4, committed=2, rolled_back=2)

    assert (statistics.committed, statistics.rolled_back, statistics.refused) == (2, 2, 4)
    assert store_bench.seen() == [half.value for (first, _), half in zip(cases, halves, strict=True) if first is COMMIT]


def test_a_decision_for_an_unknown_id_or_of_another_group_is_refused(store_bench: StoreBench) -> None:
    settler = store_bench.settler(**NO_CHECKS)
    half = store_bench.half()
    prepared = store_bench.prepare(half)

    store_bench.decide(store_bench.forge(prepared, [half._replace(transaction_id=new_id())]), COMMIT)
    store_bench.decide(store_bench.forge(prepared, [half._replace(group="others")]), ROLLBACK)
    waiting = counted(settler, refused=2)
    assert (waiting.pending, waiting.committed, waiting.rolled_back) == (1, 0, 0)
    store_bench.decide(prepared, COMMIT)
    settled(settler, committed=1)

    assert store_bench.seen() == [b"v"]


def test_a_decision_that_races_a_check_makes_one_message(store_bench: StoreBench) -> None:
    settler = store_bench.settler()
    prepared: dict[str, Prepared] = {}
    late: list[threading.Thread] = []

    def answer(request: CheckRequest) -> Verdict:
        # The producer's own decision comes just now.
        one = prepared.pop(request.half.transaction_id, None)
        if one is not None:
            late.append(threading.Thread(target=store_bench.decide, args=(one, COMMIT)))
            late[-1].start()
        return COMMIT

    for number in range(20):
        half = store_bench.half(b"%d" % number)
        prepared[half.transaction_id] = store_bench.prepare(half)
    with store_bench.answering(answer):
        # Both are stored; the one that comes second is refused.
        settled(settler, committed=20, refused=20)

    assert len(late) == 20
    for thread in late:
        thread.join(20)
    assert Counter(store_bench.seen()) == Counter(b"%d" % number for number in range(20))


def test_a_commit_after_a_check_rolled_back_is_refused(store_bench: StoreBench) -> None:
    settler = store_bench.settler()

    with store_bench.answering(lambda _: ROLLBACK):
        prepared = store_bench.prepare(store_bench.half())
        settled(settler, rolled_back=1)
    store_bench.decide(prepared, COMMIT)
    counted(settler, refused=1)

    assert store_bench.seen() == []


def test_no_check_comes_before_the_immunity_ends_and_none_is_spent_on_it(store_bench: StoreBench) -> None:
    settler = store_bench.settler(check_max=1)
    immunity_s = TIMEOUT_S + 3 * INTERVAL_S
    asked_at: dict[bytes | None, float] = {}

    def answer(request: CheckRequest) -> Verdict:
        asked_at.setdefault(request.half.value, time.time())
        return UNKNOWN

    with store_bench.answering(answer) as asked:
        sent = time.time()
        store_bench.send(None, store_bench.half(b"immune", immunity_ms=int(immunity_s * 1000)))
        store_bench.send(None, store_bench.half(b"plain"))
        statistics = settled(settler, discarded=2)

    # Clocks of birth are this machine's, in whole milliseconds.
    assert asked_at[b"immune"] >= sent + immunity_s - 0.01
    assert asked_at[b"plain"] >= sent + TIMEOUT_S - 0.01
    assert {one.check_number for one in asked} == {1}
    assert statistics.answered_checks == 2


def test_a_group_that_is_down_longer_than_15_intervals_loses_nothing(store_bench: StoreBench) -> None:
    settler = store_bench.settler(check_interval_s=0.1, check_max=15)

    store_bench.send(None, store_bench.half())
    waiting = counted(settler, no_producer=3)
    wait_s = 16 * 0.1 + TIMEOUT_S
    down = threading.Event()
    down.wait(wait_s)
    assert (waiting.checks, settler.statistics().answered_checks, settler.statistics().pending) == (0, 0, 1)
    with store_bench.answering(lambda _: COMMIT):
        settled(settler, committed=1)

    assert store_bench.seen() == [b"v"]


def test_who_does_not_answer_delays_nobody_else(store_bench: StoreBench) -> None:
    settler = store_bench.settler()
    dead = store_bench.half(b"dead", group="dead")

    store_bench.send(None, dead)
    with store_bench.answering(lambda _: COMMIT):
        for number in range(10):
            store_bench.send(None, store_bench.half(b"%d" % number))
        counted(settler, committed=10)

    assert settler.statistics().pending == 1
    assert Counter(store_bench.seen()) == Counter(b"%d" % number for number in range(10))


def test_messages_are_visible_in_the_order_of_their_decisions(store_bench: StoreBench) -> None:
    settler = store_bench.settler(**NO_CHECKS)

    prepared = [store_bench.prepare(store_bench.half(b"%d" % number, key=b"k")) for number in range(40)]
    for one in reversed(prepared):
        store_bench.decide(one, COMMIT)
    settled(settler, committed=40)

    assert store_bench.seen() == [b"%d" % number for number in reversed(range(40))]


def test_what_was_stored_is_there_after_all_came_back(store_bench: StoreBench) -> None:
    committed = [store_bench.half(b"%d" % number, key=b"k") for number in range(5)]
    for half in committed:
        store_bench.send(COMMIT, half)
    store_bench.send(ROLLBACK, store_bench.half(b"rolled back"))
    undecided = store_bench.prepare(store_bench.half(b"undecided"))

    store_bench.reopen()
    settler = store_bench.settler(**NO_CHECKS)
    counted(settler, committed=5)
    store_bench.decide(undecided, COMMIT)
    settled(settler, committed=6)

    assert store_bench.seen() == [*(half.value for half in committed), b"undecided"]
    store_bench.reopen()
    settled(store_bench.settler(**NO_CHECKS))
    assert len(store_bench.seen()) == 6


def test_the_count_of_answered_checks_survives_a_restart(store_bench: StoreBench) -> None:
    settler = store_bench.settler(check_max=4)
    store_bench.send(None, store_bench.half())
    with store_bench.answering(lambda _: UNKNOWN) as asked:
        first = counted(settler, answered_checks=2).answered_checks
    store_bench.reopen()

    settler = store_bench.settler(check_max=4)
    with store_bench.answering(lambda _: UNKNOWN) as more:
        second = settled(settler, discarded=1).answered_checks

    assert {one.check_number for one in (*asked, *more)} == {1, 2, 3, 4}
    assert first + second in (4, 3)
    assert store_bench.seen() == []
