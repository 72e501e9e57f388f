"""One suite for every store: decisions, order, delays, several messages, and the statistics of a coordinator."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

import pytest
from conformance.store_cases import NO_CHECKS, KafkaBench, StoreBench, counted, settled

from penstock.errors import StoppedError
from penstock.transactions import new_id
from penstock.transactions.wire.ops import Verdict
from telemetry_tools import Recorded
from waiting import wait_until

COMMIT, ROLLBACK, UNKNOWN = Verdict.COMMIT, Verdict.ROLLBACK, Verdict.UNKNOWN


def test_what_commits_is_visible_once_with_its_key_and_headers_and_what_rolls_back_never(
    store_bench: StoreBench,
) -> None:
    coordinator = store_bench.coordinator(**NO_CHECKS)
    half = store_bench.half(b"v", key=b"k", headers=(("a", b"1"), ("none", None)))

    prepared = store_bench.prepare(half)
    store_bench.send(ROLLBACK, store_bench.half(b"no"))
    counted(coordinator, rolled_back=1)
    assert store_bench.seen() == []
    store_bench.decide(prepared, COMMIT)
    settled(coordinator, committed=1)

    # What rolls back was never written and then aborted.
    (message,) = store_bench.messages(committed_only=False)
    assert (message.key(), message.value(), message.headers()) == (b"k", b"v", [("a", b"1"), ("none", None)])


def test_the_first_decision_stands_and_the_second_is_refused(store_bench: StoreBench) -> None:
    coordinator = store_bench.coordinator(**NO_CHECKS)
    cases = [(COMMIT, COMMIT), (ROLLBACK, COMMIT), (COMMIT, ROLLBACK), (ROLLBACK, ROLLBACK)]

    halves = [store_bench.half(b"%s then %s" % (a.name.encode(), b.name.encode())) for a, b in cases]
    prepared = [store_bench.send(first, half) for (first, _), half in zip(cases, halves, strict=True)]
    # At once, and long after.
    for refused in (4, 8):
        for (_, second), one in zip(cases, prepared, strict=True):
            store_bench.decide(one, second)
        statistics = settled(coordinator, refused=refused, committed=2, rolled_back=2)
        assert (statistics.committed, statistics.rolled_back, statistics.refused) == (2, 2, refused)

    assert store_bench.seen() == [half.value for (first, _), half in zip(cases, halves, strict=True) if first is COMMIT]


def test_a_decision_for_an_unknown_id_or_of_another_group_is_refused(store_bench: StoreBench) -> None:
    coordinator = store_bench.coordinator(**NO_CHECKS)
    half = store_bench.half()
    prepared = store_bench.prepare(half)

    store_bench.decide(store_bench.forge(prepared, [half._replace(transaction_id=new_id())]), COMMIT)
    store_bench.decide(store_bench.forge(prepared, [half._replace(group="others")]), ROLLBACK)
    waiting = counted(coordinator, refused=2)
    assert (waiting.pending, waiting.committed, waiting.rolled_back) == (1, 0, 0)
    store_bench.decide(prepared, COMMIT)
    settled(coordinator, committed=1)

    assert store_bench.seen() == [b"v"]


def test_messages_are_visible_in_the_order_of_their_decisions(store_bench: StoreBench) -> None:
    coordinator = store_bench.coordinator(**NO_CHECKS)

    prepared = [store_bench.prepare(store_bench.half(b"%d" % number, key=b"k")) for number in range(40)]
    for stored_half in reversed(prepared):
        store_bench.decide(stored_half, COMMIT)
    settled(coordinator, committed=40)

    assert store_bench.seen() == [b"%d" % number for number in reversed(range(40))]


def test_what_was_stored_is_there_after_all_came_back(store_bench: StoreBench) -> None:
    committed = [store_bench.half(b"%d" % number, key=b"k") for number in range(5)]
    for half in committed:
        store_bench.send(COMMIT, half)
    store_bench.send(ROLLBACK, store_bench.half(b"rolled back"))
    undecided = store_bench.prepare(store_bench.half(b"undecided"))

    store_bench.reopen()
    coordinator = store_bench.coordinator(**NO_CHECKS)
    counted(coordinator, committed=5)
    store_bench.decide(undecided, COMMIT)
    settled(coordinator, committed=6)

    assert store_bench.seen() == [*(half.value for half in committed), b"undecided"]
    store_bench.reopen()
    settled(store_bench.coordinator(**NO_CHECKS))
    assert len(store_bench.seen()) == 6


def test_several_messages_are_visible_together_or_not_at_all(
    store_bench: StoreBench, new_topic: Callable[..., str]
) -> None:
    other, coordinator = new_topic(partitions=2), store_bench.coordinator(**NO_CHECKS)
    for verdict, value in ((COMMIT, b"yes"), (ROLLBACK, b"no")):
        one = store_bench.half(value, part=(1, 2))
        store_bench.send(verdict, one, one._replace(topic=other, partition=1, part=(2, 2)))

    settled(coordinator, committed=1, rolled_back=1)

    assert store_bench.seen() == store_bench.seen(other) == [b"yes"]
    assert [message.partition() for message in store_bench.messages(other)] == [1]


def test_a_delayed_message_is_published_when_it_is_due_and_not_before(store_bench: StoreBench) -> None:
    coordinator = store_bench.coordinator(**NO_CHECKS)
    # So that it is at work before the time begins.
    store_bench.send(COMMIT, store_bench.half(b"first"))
    counted(coordinator, committed=1)
    due = time.time() + 3

    store_bench.send(COMMIT, store_bench.half(b"in 2109", deliver_at_ms=1 << 42))
    store_bench.send(COMMIT, store_bench.half(b"later", deliver_at_ms=int(due * 1000)))
    store_bench.send(COMMIT, store_bench.half(b"now"))
    counted(coordinator, committed=3, delayed=1)
    waiting = coordinator.statistics()

    assert (waiting.pending, waiting.delayed) == (1, 1)
    # Append times are those of this machine's clock, cut to milliseconds.
    appended_ms = {message.value(): message.timestamp()[1] for message in store_bench.messages()}
    assert set(appended_ms) == {b"first", b"now", b"later"}
    assert appended_ms[b"later"] >= due * 1000 - 50


def test_an_undecided_half_holds_later_halves_of_its_key_and_no_others(store_bench: StoreBench) -> None:
    coordinator = store_bench.coordinator(**NO_CHECKS)
    first = store_bench.prepare(store_bench.half(b"1", order_key=b"k"))
    second = store_bench.prepare(store_bench.half(b"2", order_key=b"k"))
    third = store_bench.prepare(store_bench.half(b"3", order_key=b"k"))

    store_bench.decide(third, COMMIT)
    store_bench.send(COMMIT, store_bench.half(b"other", order_key=b"o"))
    store_bench.send(COMMIT, store_bench.half(b"none"))
    # The log of a partition may be read later than that of another.
    assert counted(coordinator, committed=2, pending=3).pending == 3
    assert Counter(store_bench.seen()) == Counter([b"other", b"none"])
    # It comes back to the same.
    store_bench.reopen()
    coordinator = store_bench.coordinator(**NO_CHECKS)
    store_bench.decide(second, ROLLBACK)
    store_bench.decide(first, COMMIT)
    settled(coordinator, committed=2)

    assert store_bench.seen()[2:] == [b"1", b"3"]


def test_halves_of_a_key_that_were_decided_in_another_order_are_published_in_theirs(store_bench: StoreBench) -> None:
    first, second, third = (
        store_bench.prepare(store_bench.half(value, order_key=b"k")) for value in (b"1", b"2", b"3")
    )

    # The second waits for the first, which was decided later; the third was decided after both.
    for prepared in (second, first, third):
        store_bench.decide(prepared, COMMIT)
    settled(store_bench.coordinator(**NO_CHECKS), committed=3)

    assert store_bench.seen() == [b"1", b"2", b"3"]


def test_an_undecided_half_holds_its_key_in_its_own_group_alone(
    store_bench: StoreBench, new_topic: Callable[..., str]
) -> None:
    other, coordinator = new_topic(), store_bench.coordinator(**NO_CHECKS)
    undecided = store_bench.prepare(store_bench.half(b"undecided", group="billing", order_key=b"42"))

    store_bench.send(COMMIT, store_bench.half(b"behind it", group="billing", topic=other, order_key=b"42"))
    store_bench.send(COMMIT, store_bench.half(b"1", group="shipping", order_key=b"42"))
    store_bench.send(COMMIT, store_bench.half(b"2", group="shipping", topic=other, order_key=b"42"))
    counted(coordinator, committed=2)

    def waiting() -> tuple[int, int]:
        now = coordinator.statistics()
        return now.pending, now.held_by_key

    wait_until(lambda: waiting() == (2, 1))
    assert (store_bench.seen(), store_bench.seen(other)) == ([b"1"], [b"2"])
    # It comes back to the same.
    store_bench.reopen()
    coordinator = store_bench.coordinator(**NO_CHECKS)
    counted(coordinator, held_by_key=1)
    store_bench.decide(undecided, COMMIT)
    settled(coordinator, committed=2)

    assert (store_bench.seen(), store_bench.seen(other)) == ([b"1", b"undecided"], [b"2", b"behind it"])


def test_a_coordinator_shows_what_it_counts_and_what_waits_for_what(store_bench: StoreBench) -> None:
    recorded = Recorded()
    coordinator = store_bench.coordinator(**NO_CHECKS, telemetry=recorded.telemetry())

    store_bench.send(None, store_bench.half(b"first", key=b"k", order_key=b"k"))
    store_bench.send(COMMIT, store_bench.half(b"behind it", key=b"k", order_key=b"k"))
    store_bench.send(COMMIT, store_bench.half(b"late", deliver_at_ms=int(time.time() * 1000) + 3_600_000))
    store_bench.send(ROLLBACK, store_bench.half(b"no"))
    twice = store_bench.send(COMMIT, store_bench.half(b"yes"))
    store_bench.decide(twice, ROLLBACK)
    statistics = counted(coordinator, committed=1, rolled_back=1, refused=1, held_by_key=1, delayed=1)
    assert (statistics.pending, statistics.held_by_key, statistics.delayed) == (3, 1, 1)
    shown = {
        name.removeprefix("penstock.transactions."): {
            (dict(point.attributes).get("penstock.transactions.held_by", "")): point.value
            for point in metric.data.data_points
            if dict(point.attributes)["penstock.transactions.prefix"] == store_bench.prefix
        }
        for name, metric in recorded.metrics().items()
    }

    assert shown["pending"] == {"": 3}
    assert shown["held"] == {"target": 0, "key": 1, "time": 1}
    assert shown["oldest_pending_age"][""] > 0
    totals = ("committed", "rolled_back", "discarded", "refused", "checks", "no_producer")
    assert [shown[name][""] for name in totals] == [1, 1, 0, 1, 0, 0]
    assert shown["finish_time"][""] > 0
    # Of topics that others write, and that have a retention.
    assert ("forged" in shown, "lost" in shown) == (isinstance(store_bench, KafkaBench),) * 2
    coordinator.stop()
    assert recorded.metrics() == {}, "a coordinator that ended is no longer shown"


def test_a_coordinator_may_be_started_and_stopped_twice_and_does_not_come_back(store_bench: StoreBench) -> None:
    never_started = store_bench.make_coordinator()
    coordinator = store_bench.coordinator(**NO_CHECKS)
    coordinator.start()
    store_bench.send(COMMIT, store_bench.half(b"v"))
    settled(coordinator, committed=1)

    never_started.stop()
    for _ in range(2):
        coordinator.stop()
        assert coordinator.wait(0)
    with pytest.raises(StoppedError, match="make a new one"):
        coordinator.start()

    # The store goes on.
    store_bench.send(COMMIT, store_bench.half(b"more"))
    settled(store_bench.coordinator(**NO_CHECKS), committed=1)
    assert store_bench.seen() == [b"v", b"more"]
