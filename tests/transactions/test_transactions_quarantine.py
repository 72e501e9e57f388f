"""What the main path of a relay leaves out, when it is tried, and what waits behind it: pure."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any, cast

from penstock.clients.transactional.faults import Fault
from penstock.transactions.coordinator.publishing.targets import NOT_KNOWN
from penstock.transactions.coordinator.publishing.trials import Trials
from penstock.transactions.stores.relay.publishable import OutboundMessage, Outcome, Publishable
from penstock.transactions.stores.relay.quarantine import Quarantine
from penstock.transactions.writing.target_quarantine import TargetQuarantine


def entry(name: str, *messages: tuple[str, bytes | None], discards: str | None = None) -> Publishable:
    made = [OutboundMessage(topic, None, key, b"v", ()) for topic, key in messages]
    return Publishable(name, made, None, discards)


def names(entries: object) -> list[str]:
    return [one.transaction_id for one in entries]  # type: ignore[attr-defined] # a sequence of them


def dead(topic: str) -> dict[str, Fault]:
    return {topic: Fault(f"{topic}: gone", whole=True)}


def test_a_dead_topic_is_left_out_and_tried_with_one_at_growing_intervals() -> None:
    quarantine = Quarantine()
    first = entry("1", ("dead", None))
    assert quarantine.main_ended([first], Outcome(refused={"1": "gone"}, faults=dead("dead")), 0.0)["1"].why == "gone"

    go, held = quarantine.admit([entry("2", ("dead", None)), entry("3", ("well", b"k"))], 0.0)
    assert (names(go), list(held)) == (["3"], ["2"])

    tries, now = [], 0.0
    while len(tries) < 9:
        chosen = quarantine.next_trial(now)
        if chosen:
            assert len(chosen) == 1
            tries.append(now)
            quarantine.tried(Outcome(refused={chosen[0]: "gone"}, faults=dead("dead")), now)
        now += 0.1
    pauses = [round(after - before, 1) for before, after in itertools.pairwise(tries)]
    assert pauses == sorted(pauses)
    assert 29 < pauses[-1] < 31


def test_a_topic_that_takes_one_again_gets_all_that_waited_and_goes_back_after_a_while() -> None:
    quarantine = Quarantine()
    quarantine.main_ended([entry("1", ("dead", None))], Outcome(refused={"1": "gone"}, faults=dead("dead")), 0.0)
    quarantine.admit([entry("2", ("dead", None)), entry("3", ("dead", None))], 0.0)
    assert quarantine.next_trial(0.4) == []

    assert quarantine.next_trial(1.0) == ["1"]
    quarantine.tried(Outcome(published=["1"]), 1.0)
    assert quarantine.next_trial(1.0) == ["2", "3"]
    quarantine.tried(Outcome(published=["2", "3"]), 1.1)
    assert quarantine.is_empty

    # It is watched for a while; a return that fails makes the next one wait longer.
    assert list(quarantine.admit([entry("4", ("dead", None))], 1.1)[1]) == ["4"]
    assert quarantine.next_trial(1.2) == ["4"]
    quarantine.tried(Outcome(published=["4"]), 1.3)
    assert names(quarantine.admit([entry("5", ("dead", None))], 10.0)[0]) == ["5"]


def test_a_topic_that_fails_again_when_it_is_back_stays_apart_for_longer_each_time() -> None:
    quarantine, now, apart_for = Quarantine(), 0.0, list[float]()

    for number in range(8):
        left, tried = f"left {number}", f"tried {number}"
        begun = now
        quarantine.main_ended([entry(left, ("dead", None))], Outcome(refused={left: "gone"}, faults=dead("dead")), now)
        now += 0.6
        assert quarantine.next_trial(now) == [left]
        quarantine.tried(Outcome(published=[left]), now)
        while quarantine.admit([entry(tried, ("dead", None))], now)[1]:
            assert quarantine.next_trial(now) == [tried]
            quarantine.tried(Outcome(published=[tried]), now)
            now += 0.5
        apart_for.append(now - begun)

    assert apart_for == sorted(apart_for)
    assert apart_for[0] < 6
    assert 300 <= apart_for[-1] < 302


def test_one_that_is_refused_again_and_again_does_not_keep_its_topic_apart() -> None:
    quarantine, now, went = Quarantine(), 0.0, list[float]()
    stuck = entry("stuck", ("sick", b"k"))
    fault = {"sick": Fault("sick: too large", whole=False)}
    quarantine.main_ended([stuck], Outcome(refused={"stuck": "too large"}, faults=fault), now)
    tries = 0

    for number in range(1_000):
        if quarantine.next_trial(now):
            tries += 1
            quarantine.tried(Outcome(refused={"stuck": "too large"}), now)
        go, held = quarantine.admit([entry(f"{number}", ("sick", b"o"))], now)
        went += [now] if go else []
        quarantine.remove(held)
        now += 0.1

    assert 5 <= tries <= 10
    assert 4 < went[0] < 6
    assert len(went) == 1_000 - went[0] * 10


def test_what_is_tried_and_may_fail_is_never_mixed_with_the_rest() -> None:
    quarantine = Quarantine()
    for topic in ("a", "b"):
        quarantine.main_ended([entry(topic, (topic, None))], Outcome(refused={topic: "gone"}, faults=dead(topic)), 0.0)
    quarantine.admit([entry("more", ("a", None))], 0.0)
    held = quarantine.admit([entry("both", ("a", b"k"), ("well", b"k")), entry("behind", ("well", b"k"))], 0.0)[1]
    assert list(held) == ["both", "behind"]

    assert quarantine.next_trial(1.0) == ["a", "b"]
    quarantine.tried(Outcome(published=["a"], refused={"b": "gone"}, faults=dead("b")), 1.0)
    assert quarantine.next_trial(1.0) == ["more", "both", "behind"]


def test_a_marker_that_came_too_late_once_is_no_reason_once_another_came_in_time() -> None:
    quarantine, slot = TargetQuarantine(), SimpleNamespace(lost_ids=1, is_ready=False, poll=lambda _: None)
    partition = SimpleNamespace(
        state=SimpleNamespace(queue=SimpleNamespace(set_aside=SimpleNamespace(topics={"sick"}.copy)))
    )
    targets = SimpleNamespace(quarantine=quarantine, missing=lambda *_: NOT_KNOWN)
    rest: dict[str, Any] = dict.fromkeys(("group_metadata", "gate", "under_way", "counts", "ration"))
    trials = Trials([cast("Any", slot)], targets=cast("Any", targets), owned={0: cast("Any", partition)}, **rest)
    quarantine.refuse("1", "sick", "too large", 0.0)

    # The broker took long to end the transaction of the first try, and ended that of the second at once.
    trials._trials[0].topic = "sick"
    trials.begin(0.0)
    assert "cannot end" in quarantine.reasons()["sick"]
    trials._trials[0].topic, slot.is_ready = "sick", True
    trials.begin(1.0)

    assert (quarantine.reasons(), quarantine.refusals()) == ({}, {"1": "too large"})
