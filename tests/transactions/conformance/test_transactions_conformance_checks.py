"""One suite for every store, its checks: which producer gets them, when, how often, and their effect."""

from __future__ import annotations

import threading
import time
from collections import Counter

import pytest
from conformance.store_cases import BUT_SQL, INTERVAL_S, TIMEOUT_S, StoreBench, counted, settled

from penstock.transactions import HalfMessage, TransactionState
from penstock.transactions.store import Prepared
from penstock.transactions.wire.half import CheckRequest
from penstock.transactions.wire.ops import Verdict
from waiting import wait_until

COMMIT, ROLLBACK, UNKNOWN = Verdict.COMMIT, Verdict.ROLLBACK, Verdict.UNKNOWN


def test_what_is_undecided_is_settled_by_a_check_and_a_decision_after_it_is_refused(store_bench: StoreBench) -> None:
    coordinator = store_bench.coordinator()
    yes = store_bench.half(b"yes", key=b"k", headers=(("h", b"1"),))
    no = store_bench.half(b"no")

    with store_bench.answering(lambda request: COMMIT if request.half.value == b"yes" else ROLLBACK) as asked:
        store_bench.send(None, yes)
        late = store_bench.prepare(no)
        settled(coordinator, committed=1, rolled_back=1)
    store_bench.decide(late, COMMIT)
    counted(coordinator, refused=1)

    assert {one.check_number for one in asked} == {1}
    assert next(one.half for one in asked if one.half.value == b"yes") == yes
    assert store_bench.seen() == [b"yes"]


def test_what_stays_unknown_is_discarded_after_exactly_as_many_answered_checks_as_allowed(
    store_bench: StoreBench,
) -> None:
    limit = store_bench.checks_allowed
    coordinator = store_bench.coordinator(check_interval=0.05, check_max=limit)
    half = store_bench.half(b"v", key=b"k")

    with store_bench.answering(lambda _: UNKNOWN) as asked:
        late = store_bench.send(None, half)
        statistics = settled(coordinator, discarded=1)
    # A decision after that comes too late.
    store_bench.decide(late, COMMIT)
    assert counted(coordinator, refused=1).committed == 0

    # One that is slow to be answered is asked again under its number, and counts once.
    assert {one.check_number for one in asked} == set(range(1, limit + 1))
    assert (statistics.answered_checks, statistics.committed) == (limit, 0)
    assert store_bench.seen() == []
    (discarded,) = store_bench.messages(store_bench.discarded)
    assert (discarded.key(), discarded.value()) == (b"k", b"v")
    headers = dict(discarded.headers())
    assert headers["penstock-tx"] == half.transaction_id.encode()
    assert headers["penstock-topic"] == store_bench.topic.encode()
    assert headers["penstock-reason"] == b"checks exhausted"


def test_120_messages_with_a_five_way_mix_of_outcomes(store_bench: StoreBench) -> None:
    coordinator = store_bench.coordinator(check_max=2)

    def answer(request: CheckRequest) -> Verdict:
        return (COMMIT, ROLLBACK, COMMIT, ROLLBACK, UNKNOWN)[int(request.half.value or b"") % 5]

    with store_bench.answering(answer):
        for number in range(120):
            verdict = (COMMIT, ROLLBACK, None, None, None)[number % 5]
            store_bench.send(verdict, store_bench.half(b"%d" % number, key=b"%d" % (number % 7)))
        statistics = settled(coordinator, committed=48, rolled_back=48, discarded=24)

    assert (statistics.committed, statistics.rolled_back, statistics.discarded) == (48, 48, 24)
    assert Counter(store_bench.seen()) == Counter(b"%d" % n for n in range(120) if n % 5 in (0, 2))
    assert Counter(store_bench.seen(store_bench.discarded)) == Counter(b"%d" % n for n in range(120) if n % 5 == 4)


@BUT_SQL
def test_a_decision_that_races_a_check_makes_one_message(store_bench: StoreBench) -> None:
    coordinator = store_bench.coordinator()
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
        settled(coordinator, committed=20, refused=20)

    assert len(late) == 20
    for thread in late:
        thread.join(20)
    assert Counter(store_bench.seen()) == Counter(b"%d" % number for number in range(20))


def test_no_check_comes_before_the_immunity_ends_and_none_is_spent_on_it(store_bench: StoreBench) -> None:
    coordinator = store_bench.coordinator(check_max=1)
    immunity_s = TIMEOUT_S + 3 * INTERVAL_S
    asked_at: dict[bytes | None, float] = {}

    def answer(request: CheckRequest) -> Verdict:
        asked_at.setdefault(request.half.value, time.time())
        return UNKNOWN

    with store_bench.answering(answer) as asked:
        sent = time.time()
        store_bench.send(None, store_bench.half(b"immune", immunity_ms=int(immunity_s * 1000)))
        store_bench.send(None, store_bench.half(b"plain"))
        statistics = settled(coordinator, discarded=2)

    # Clocks of birth are this machine's, in whole milliseconds.
    assert asked_at[b"immune"] >= sent + immunity_s - 0.01
    assert asked_at[b"plain"] >= sent + TIMEOUT_S - 0.01
    assert {one.check_number for one in asked} == {1}
    assert statistics.answered_checks == 2


def test_a_group_that_is_down_longer_than_15_intervals_loses_nothing_delays_no_other_and_floods_no_log(
    store_bench: StoreBench, caplog: pytest.LogCaptureFixture
) -> None:
    interval_s = 0.05
    coordinator = store_bench.coordinator(check_interval=interval_s, check_max=15)

    begin = time.monotonic()
    store_bench.send(None, store_bench.half(b"late", group="away"))
    with store_bench.answering(lambda _: COMMIT):
        for number in range(10):
            store_bench.send(None, store_bench.half(b"%d" % number))
        counted(coordinator, committed=10, no_producer=3)
    wait_until(lambda: time.monotonic() > begin + TIMEOUT_S + 17 * interval_s)
    waiting = coordinator.statistics()
    # Those of the others were answered, once each.
    assert (waiting.answered_checks, waiting.pending) == (10, 1)
    assert 1 <= sum("no producer of" in line for line in caplog.messages) <= 2
    why = ["a producer of group away: none runs"]
    wait_until(lambda: [value.waits_for for value in store_bench.pending().values()] == why)
    with store_bench.answering(lambda _: COMMIT, "away"):
        settled(coordinator, committed=11)

    assert Counter(store_bench.seen()) == Counter([b"late", *(b"%d" % number for number in range(10))])


def test_the_count_of_answered_checks_survives_a_restart(store_bench: StoreBench) -> None:
    coordinator = store_bench.coordinator(check_max=4)
    store_bench.send(None, store_bench.half())
    with store_bench.answering(lambda _: UNKNOWN) as asked:
        first = counted(coordinator, answered_checks=2).answered_checks
    store_bench.reopen()

    coordinator = store_bench.coordinator(check_max=4)
    with store_bench.answering(lambda _: UNKNOWN) as more:
        second = settled(coordinator, discarded=1).answered_checks

    assert {one.check_number for one in (*asked, *more)} == {1, 2, 3, 4}
    # Some may have been answered, and not counted yet, when the first was stopped.
    assert first + second <= 4
    assert store_bench.seen() == []


def test_a_check_that_hangs_on_one_producer_is_reported_and_asked_of_another(
    store_bench: StoreBench, caplog: pytest.LogCaptureFixture
) -> None:
    let_go = threading.Event()
    hanging: set[str] = set()

    def hang(half: HalfMessage) -> TransactionState:
        hanging.add(half.transaction_id)
        let_go.wait(120)
        return TransactionState.UNKNOWN

    sent = 0

    def send_more() -> bool:
        nonlocal sent
        for _ in range(4):
            store_bench.send(None, store_bench.half())
        sent += 4
        return len(hanging) > 1

    coordinator = store_bench.coordinator(transaction_timeout=0.1)
    with (
        store_bench.producer(check=lambda _: TransactionState.COMMIT),
        store_bench.producer(check=hang, check_timeout=0.5),
    ):
        try:
            wait_until(send_more, 60, 1.0)
            settled(coordinator, committed=sent)
            wait_until(lambda: "has not returned within 0.5 s: it is given up" in caplog.text)
        finally:
            let_go.set()

    assert len(store_bench.seen()) == sent


@pytest.mark.parametrize("policy", ["commit", "rollback"])
def test_a_fixed_discard_policy_decides(store_bench: StoreBench, policy: str) -> None:
    coordinator = store_bench.coordinator(check_max=1, transaction_timeout=0.1, check_interval=0.1, discard=policy)

    with store_bench.answering(lambda _: UNKNOWN):
        store_bench.send(None, store_bench.half())
        statistics = settled(coordinator, **{"commit": {"committed": 1}, "rollback": {"rolled_back": 1}}[policy])

    assert statistics.discarded == 0
    assert store_bench.seen() == ([b"v"] if policy == "commit" else [])


@BUT_SQL
def test_a_discard_policy_that_is_a_function_decides_and_where_it_is_unsure_the_message_is_discarded(
    store_bench: StoreBench,
) -> None:
    def policy(half: HalfMessage) -> TransactionState:
        return TransactionState[(half.value or b"").decode()]

    coordinator = store_bench.coordinator(check_max=1, transaction_timeout=0.1, check_interval=0.1, discard=policy)

    with store_bench.answering(lambda _: UNKNOWN):
        for state in TransactionState:
            store_bench.send(None, store_bench.half(state.name.encode()))
        statistics = settled(coordinator, committed=1, rolled_back=1, discarded=1)

    assert (statistics.committed, statistics.rolled_back, statistics.discarded) == (1, 1, 1)
    assert store_bench.seen() == [b"COMMIT"]
    assert store_bench.seen(store_bench.discarded) == [b"UNKNOWN"]


@BUT_SQL
def test_a_discard_policy_that_hangs_delays_no_other_transaction(store_bench: StoreBench) -> None:
    let_go, begun = threading.Event(), threading.Event()

    def policy(half: HalfMessage) -> TransactionState:
        if half.value == b"hangs":
            begun.set()
            let_go.wait(120)
        return TransactionState.COMMIT

    # Its time limit is longer than the test waits for the others.
    times = {"transaction_timeout": 0.1, "check_interval": 0.1, "check_timeout": 120.0}
    coordinator = store_bench.coordinator(check_max=1, discard=policy, **times)
    try:
        with store_bench.answering(lambda request: COMMIT if request.half.value == b"checked" else UNKNOWN):
            store_bench.send(None, store_bench.half(b"hangs"))
            wait_until(begun.is_set, 60)
            for value, verdict in ((b"sent", COMMIT), (b"checked", None), (b"asked", None)):
                store_bench.send(verdict, store_bench.half(value))
            counted(coordinator, committed=3)
            assert Counter(store_bench.seen()) == Counter([b"sent", b"checked", b"asked"])
    finally:
        let_go.set()
    statistics = settled(coordinator, committed=4)

    assert (statistics.hung_checks, statistics.discarded) == (0, 0)
    assert Counter(store_bench.seen()) == Counter([b"sent", b"checked", b"asked", b"hangs"])


@BUT_SQL
def test_a_discard_policy_that_raises_hangs_or_answers_nonsense_is_logged_and_has_said_unknown(
    store_bench: StoreBench, caplog: pytest.LogCaptureFixture
) -> None:
    let_go = threading.Event()

    def policy(half: HalfMessage) -> TransactionState:
        if half.value == b"raises":
            raise ValueError(half.topic)
        if half.value == b"hangs":
            let_go.wait(120)
            return TransactionState.COMMIT
        return "nonsense"  # type: ignore[return-value] # wrong on purpose

    times = {"transaction_timeout": 0.1, "check_interval": 0.1, "check_timeout": 0.5}
    coordinator = store_bench.coordinator(check_max=1, discard=policy, **times)
    halves = {value: store_bench.half(value) for value in (b"raises", b"hangs", b"nonsense")}

    try:
        with store_bench.answering(lambda _: UNKNOWN):
            for half in halves.values():
                store_bench.send(None, half)
            statistics = settled(coordinator, discarded=3)
    finally:
        let_go.set()

    assert (statistics.hung_checks > 0, statistics.committed) == (True, 0)
    assert Counter(store_bench.seen(store_bench.discarded)) == Counter(list(halves))
    ids = {value: half.transaction_id for value, half in halves.items()}
    assert (
        f"the discard policy for transaction {ids[b'raises']} raised ValueError; the answer is UNKNOWN" in caplog.text
    )
    assert f"the discard policy for transaction {ids[b'hangs']} has not returned within 0.5 s" in caplog.text
    assert f"the discard policy for transaction {ids[b'nonsense']} returned a str instead of a" in caplog.text


@BUT_SQL
def test_answered_checks_are_all_whose_answer_counted_whatever_it_was(store_bench: StoreBench) -> None:
    answers = {b"yes": [COMMIT], b"no": [ROLLBACK], b"later": [UNKNOWN, UNKNOWN, COMMIT]}
    coordinator = store_bench.coordinator()

    # By the check's number: one that is not answered in time is asked again, and counts once.
    with store_bench.answering(lambda request: answers[request.half.value or b""][request.check_number - 1]):
        for value in list(answers):
            store_bench.send(None, store_bench.half(value))
        # No check is sent for it: no answer.
        store_bench.send(COMMIT, store_bench.half(b"decided"))
        statistics = settled(coordinator, committed=3, rolled_back=1)

    assert statistics.answered_checks == 5
