"""Targets that refuse messages, take nothing, or come and go, and calls into the client that do not come back."""

from __future__ import annotations

import re
import threading
from collections import Counter
from collections.abc import Callable

import pytest
from confluent_kafka.admin import AdminClient
from conformance.store_cases import NO_CHECKS, StoreBench, counted, settled

from kafka_tools import limit, read_all
from penstock.clients.topics import TopicSpec, ensure_topics
from penstock.clients.transactional.end_watch import EndWatch
from penstock.devbroker import DevBroker
from penstock.transactions.wire.half import REASON
from penstock.transactions.wire.ops import Verdict
from waiting import wait_until

COMMIT, DISCARD = Verdict.COMMIT, Verdict.DISCARD

Made = Callable[..., str]


#: It publishes through the relay, as SQLite's does.
LATER = pytest.param("file", marks=pytest.mark.thorough)
#: The stores with the publishing that is theirs; and those that publish through the relay.
EACH, RELAYED = (
    pytest.mark.parametrize("store_bench", kinds, indirect=True)
    for kinds in (["kafka", "sqlite", LATER], [LATER, "sqlite"])
)


@pytest.fixture
def bench(store_bench: StoreBench) -> StoreBench:
    """A store; its topic is the healthy one."""
    return store_bench


def delete(admin: AdminClient, topic: str) -> None:
    admin.delete_topics([topic])[topic].result()
    wait_until(lambda: topic not in admin.list_topics(timeout=30).topics)


@EACH
def test_a_target_that_refuses_everything_costs_the_others_only_a_moment(
    bench: StoreBench, new_topic: Made, admin: AdminClient
) -> None:
    sick, well = new_topic(), bench.topic
    coordinator = bench.coordinator(**NO_CHECKS)
    bench.send(COMMIT, bench.half(b"first", topic=sick))
    counted(coordinator, committed=1)
    limit(admin, sick, 10)

    refused = []
    for number in range(30):
        refused.append(bench.send(COMMIT, bench.half(b"%d" % number, topic=sick)).halves[0].transaction_id)
        bench.send(COMMIT, bench.half(b"%d" % number, topic=well))
    counted(coordinator, committed=31, held=30)
    # What is so short takes not even the markers of transactions.
    wait_until(lambda: any(sick in value.waits_for for value in bench.pending().values()))
    assert set(bench.pending()) == set(refused)
    assert bench.seen(well) == [b"%d" % number for number in range(30)]

    limit(admin, sick, 1_000_000)
    settled(coordinator, committed=61)
    assert Counter(bench.seen(sick)) == Counter([b"first", *(b"%d" % number for number in range(30))])
    assert bench.seen(well) == [b"%d" % number for number in range(30)]


@pytest.mark.thorough
@RELAYED
def test_topics_that_take_no_markers_one_after_the_other_stop_no_other(
    bench: StoreBench, new_topic: Made, admin: AdminClient
) -> None:
    sick, well = [new_topic() for _ in range(5)], bench.topic
    coordinator = bench.coordinator(**NO_CHECKS)
    for topic in sick:
        bench.send(COMMIT, bench.half(b"first", topic=topic))
    counted(coordinator, committed=5)

    # Each blocks a transactional id, which no producer can use any more.
    for number, topic in enumerate(sick):
        limit(admin, topic, 10)
        bench.send(COMMIT, bench.half(b"refused", topic=topic))
        bench.send(COMMIT, bench.half(b"%d" % number, topic=well))
        counted(coordinator, committed=6 + number)

    assert coordinator.statistics().recoveries == 0
    assert bench.seen(well) == [b"%d" % number for number in range(5)]


@EACH
def test_what_is_refused_holds_what_must_not_pass_it_and_nothing_else_until_an_operator_discards_it(
    bench: StoreBench, new_topic: Made
) -> None:
    sick, other = new_topic(config={"max.message.bytes": "2000"}), new_topic()
    coordinator = bench.coordinator(**NO_CHECKS)
    large = b"x" * 5_000

    def send(value: bytes, key: bytes | None = None, topic: str = sick) -> str:
        return bench.send(COMMIT, bench.half(value, key=key, topic=topic)).halves[0].transaction_id

    send(b"k1", b"k")
    refused = send(large, b"k")
    behind = [send(b"k2", b"k"), send(b"k3", b"k")]
    for number in range(10):
        send(b"%d" % number, b"o")
        send(b"none")
    send(b"elsewhere", b"k", topic=other)
    # Several messages: each key and target counts.
    both = bench.half(b"both", key=b"k", part=(1, 2), topic=sick)
    whole = bench.send(COMMIT, both, both._replace(key=b"z", topic=other, part=(2, 2)))
    behind_both = send(b"behind both", b"z", topic=other)
    counted(coordinator, committed=22)
    waiting = [refused, *behind, whole.halves[0].transaction_id, behind_both]
    wait_until(lambda: set(bench.pending()) == set(waiting))
    wait_until(lambda: "MSG_SIZE_TOO_LARGE" in bench.pending()[refused].waits_for)
    # The reasons of what stands behind it are stored a moment after the rest was published.
    wait_until(lambda: refused in bench.pending()[behind[0]].waits_for)
    assert Counter(bench.seen(sick)) == Counter([b"k1", *[b"none"] * 10, *(b"%d" % number for number in range(10))])
    assert bench.seen(other) == [b"elsewhere"]

    # While a trial has it, that is refused with a sentence.
    bench.until_it_can(lambda: bench.decide_as_operator(refused, DISCARD), "being published now")
    settled(coordinator, committed=26, discarded=1)
    assert [value for value in bench.seen(sick) if value and value.startswith((b"k", b"b"))] == [
        b"k1",
        b"k2",
        b"k3",
        b"both",
    ]
    assert bench.seen(other) == [b"elsewhere", b"both", b"behind both"]
    (message,) = bench.messages(bench.discarded)
    assert message.value() == large
    assert (REASON, b"by an operator") in message.headers()


@EACH
def test_the_messages_of_a_topic_that_takes_them_again_follow_in_their_order(
    bench: StoreBench, new_topic: Made, admin: AdminClient
) -> None:
    narrow, coordinator = new_topic(config={"max.message.bytes": "2000"}), bench.coordinator(**NO_CHECKS)
    values = [b"0", bytes(5_000), b"2", b"3", bytes(6_000), b"5", b"6"]
    for value in values:
        bench.send(COMMIT, bench.half(value, key=b"k", topic=narrow))
    counted(coordinator, committed=1)
    wait_until(lambda: coordinator.statistics().held > 0)

    limit(admin, narrow, 1 << 20)
    settled(coordinator, committed=7)

    assert bench.seen(narrow) == values


@pytest.mark.thorough
@EACH
def test_targets_that_are_deleted_and_made_again_twice_lose_double_and_block_nothing(
    bench: StoreBench, new_topic: Made, admin: AdminClient, broker: DevBroker
) -> None:
    target = new_topic(partitions=2)
    coordinator = bench.coordinator(**NO_CHECKS)
    sent = 0

    def send_all(mark: bytes) -> None:
        """Send three of two messages each, three single ones, and three to the topic that is well."""
        nonlocal sent
        for number in range(3):
            one = bench.half(b"%s%d" % (mark, number), part=(1, 2), topic=target, partition=0)
            bench.send(COMMIT, one, one._replace(part=(2, 2), partition=1))
            bench.send(COMMIT, bench.half(b"%s-%d" % (mark, number), key=b"k", topic=target))
            bench.send(COMMIT, bench.half(b"%s%d" % (mark, number)))
        sent += 9

    send_all(b"before")
    settled(coordinator, committed=sent)
    for turn in (b"first", b"second"):
        delete(admin, target)
        send_all(turn)
        wait_until(lambda turn=turn: b"%s2" % turn in bench.seen())  # type: ignore[misc] # bound at once
        wait_until(lambda: (now := coordinator.statistics()).held and now.pending == 6)
        ensure_topics(admin, [TopicSpec(target, 2)])
        settled(coordinator, committed=sent)

        seen = Counter(message.value() for message in read_all(bench.servers, target))
        singles = {b"%s-%d" % (turn, number): 1 for number in range(3)}
        assert seen == Counter({**singles, **{b"%s%d" % (turn, number): 2 for number in range(3)}})
    send_all(b"after")
    settled(coordinator, committed=sent)
    assert bench.seen() == [
        b"%s%d" % (mark, n) for mark in (b"before", b"first", b"second", b"after") for n in range(3)
    ]


def waiting_for_a_call(bench: StoreBench) -> list[str]:
    """Return the reasons for waiting that `penstock tx ls` shows, of transactions that wait for a call."""
    return [value.waits_for for value in bench.pending().values() if value.waits_for.startswith("Kafka: ")]


@pytest.mark.thorough
@RELAYED
def test_a_call_that_never_comes_back_is_named_and_left_behind_and_the_next_one_goes_on(
    bench: StoreBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("penstock.transactions.publishing.publisher_slot.PUBLISH_LIMIT_S", 4.0)
    hanging, go_on = threading.Event(), threading.Event()

    def hang(*_: object) -> None:
        hanging.set()
        go_on.wait(60)

    coordinator = bench.coordinator(**NO_CHECKS)
    bench.send(COMMIT, bench.half(b"0"))
    counted(coordinator, committed=1)
    with monkeypatch.context() as patch:
        patch.setattr(EndWatch, "commit", hang)
        bench.send(COMMIT, bench.half(b"1"))
        assert hanging.wait(30)
        found = wait_until(lambda: one if (one := coordinator.statistics()).slow_call else None)
        shown = wait_until(lambda: waiting_for_a_call(bench))
    bench.send(COMMIT, bench.half(b"2"))
    statistics = settled(coordinator, committed=3)

    assert found.slow_call == "commit_transaction"
    assert found.slow_call_s > 2
    assert len(shown) == 1
    assert re.fullmatch(r"Kafka: commit_transaction has not gone on for \d+ s", shown[0])
    assert waiting_for_a_call(bench) == []
    wait_until(lambda: not coordinator.statistics().slow_call)
    assert statistics.left_behind == 1
    assert statistics.recoveries == 1
    go_on.set()
    assert bench.seen() == [b"0", b"1", b"2"]


@pytest.mark.thorough
@RELAYED
def test_a_coordinator_stops_in_time_though_a_call_never_comes_back(
    bench: StoreBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    hanging, go_on = threading.Event(), threading.Event()

    def hang(*_: object) -> None:
        hanging.set()
        go_on.wait()

    coordinator = bench.make_coordinator(**NO_CHECKS)
    coordinator.start()
    with monkeypatch.context() as patch:
        patch.setattr("penstock.transactions.publishing.publisher.Publisher._commit", hang)
        bench.send(COMMIT, bench.half(b"v"))
        assert hanging.wait(30)
        # It returns at all, though the call does not.
        coordinator.stop(timeout=5)
    go_on.set()

    settled(bench.coordinator(**NO_CHECKS))
    assert bench.seen() == [b"v"]
