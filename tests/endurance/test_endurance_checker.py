"""The checker of endurance campaigns finds each violation in a history in which it is planted, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from endurance.checker import (
    LONGEST_S,
    Fault,
    Fed,
    History,
    Outcome,
    Sent,
    Standstill,
    Visible,
    standstills,
    violations,
)
from endurance.plan import KINDS, plan
from histories import Call

Plant = Callable[[History], History]

#: Transactions by store and order; every third has three parts, every fifth is delayed.
_COUNT = 30


def good() -> History:
    """A history of two keys, of a worker that is killed and of its successor, without a violation."""
    fed = [
        Fed(topic, 0, number, f"{topic}-{number % 2}", number)
        for topic in ("singles", "keyed", "batched")
        for number in range(20)
    ]
    calls: dict[str, list[Call]] = {}
    for topic in ("singles", "keyed", "batched"):
        of_topic = [record for record in fed if record.topic == topic]
        first = [called(record, "a.1", 1.0 + record.offset) for record in of_topic[:12]]
        # What the first did last was not committed: the second does it again.
        again = [called(record, "a.2", 100.0 + record.offset) for record in of_topic[8:]]
        cut_off = replace(called(of_topic[12], "a.1", 13.0), end=None)
        calls[topic] = [*first, cut_off, *again]
    sent, visible = [], []
    for store in ("kafka", "sql", "file"):
        for number in range(_COUNT):
            order = "half" if number % 2 else "commit"
            name, parts = f"{store}.{number}", 3 if number % 3 == 0 else 1
            due_s = 50.0 if order == "commit" and number % 5 == 0 else None
            sent.append(Sent(store, name, parts, due_s))
            for part in range(parts):
                topic = f"{store}-second" if part == 2 else f"{store}-target"
                visible.append(Visible(topic, f"{store}.{order}.0", name, part, number, 60.0 + number))
    return History(
        fed=fed,
        calls=calls,
        results=[
            Outcome(record.topic, record.key, record.number)
            for record in fed
            if record.number != 7 or record.topic != "singles"
        ],
        dead=[Outcome("singles", "singles-1", 7)],
        counted=list(range(20)),
        sent=sent,
        visible=visible,
        stored={f"{record.name}/{record.part}": 1 for record in visible if record.topic.startswith("kafka")},
        faults=[Fault("process killed", "worker-a", 13.5, 20.0), Fault("broker frozen", "kafka", 40.0, 60.0)],
        progress={"workers": [float(at) for at in range(200)]},
        quiet=150.0,
    )


def called(record: Fed, instance: str, at: float) -> Call:
    """Return a call of a message that took half a second."""
    return Call(instance, record.key, record.partition, record.offset, at, at + 0.5)


def without_call(history: History) -> History:
    """Plant a message without a call that ended."""
    return replace(history, calls={**history.calls, "keyed": history.calls["keyed"][:-1]})


def with_overtaking_call(history: History) -> History:
    """Plant a call that began and ended before the previous call of its key."""
    *rest, last = history.calls["keyed"]
    early = replace(last, start=last.start - 2.9, end=last.start - 2.5)
    return replace(history, calls={**history.calls, "keyed": [*rest, early]})


def with_overlapping_call(history: History) -> History:
    """Plant a second call of a message while its first call ran in the same process."""
    first, *rest = history.calls["keyed"]
    again = replace(first, start=first.start + 0.1, end=first.start + 0.2)
    return replace(history, calls={**history.calls, "keyed": [first, again, *rest]})


def with_swapped_results(history: History) -> History:
    """Plant a result that stands before an earlier result of its key."""
    first, second, third, *rest = history.results
    assert first.key == third.key
    return replace(history, results=[third, second, first, *rest])


def with_swapped_halves(history: History) -> History:
    """Plant a message that stands before an earlier half of its key and topic."""
    places = [
        at for at, record in enumerate(history.visible) if record.key == "sql.half.0" and record.topic == "sql-target"
    ]
    changed = list(history.visible)
    changed[places[0]], changed[places[1]] = changed[places[1]], changed[places[0]]
    return replace(history, visible=changed)


def without_visible(history: History, *places: tuple[str, int]) -> History:
    """Remove visible messages, by transaction and part."""
    return replace(history, visible=[record for record in history.visible if (record.name, record.part) not in places])


def standing_still(history: History) -> History:
    """Plant a time without any call, long after the last fault."""
    return replace(history, progress={"workers": [0.0, 30.0, 61.0, 62.0 + LONGEST_S + 1]}, quiet=1000.0)


PLANTED: dict[str, tuple[Plant, str]] = {
    "a message without a call": (without_call, "calls of keyed: 1 lost"),
    "an overtaking call": (with_overtaking_call, "out of order: keyed-1@0:19"),
    "overlapping calls": (with_overlapping_call, "overlapping: keyed-0@0:0"),
    "a message without a result": (lambda h: replace(h, results=h.results[:-1]), "1 have no result and no dead letter"),
    "a lost dead letter": (lambda h: replace(h, dead=[]), "1 have no result and no dead letter"),
    "a result twice": (
        lambda h: replace(h, results=[*h.results, h.results[-1]]),
        "1 have results or dead letters twice",
    ),
    "a result and a dead letter": (
        lambda h: replace(h, dead=[*h.dead, Outcome("singles", "singles-0", 8)]),
        "1 have results or dead letters twice",
    ),
    "a result of nothing": (
        lambda h: replace(h, results=[*h.results, Outcome("keyed", "keyed-1", 99)]),
        "1 have a result and were never fed",
    ),
    "results out of order": (with_swapped_results, "1 have results out of order"),
    "a message that is not counted": (lambda h: replace(h, counted=h.counted[1:]), "1 are not counted"),
    "a message that is counted twice": (lambda h: replace(h, counted=[*h.counted, 3]), "1 are counted twice"),
    "a lost transaction": (lambda h: without_visible(h, ("file.1", 0)), "1 committed and are not visible"),
    "a torn transaction": (lambda h: without_visible(h, ("file.3", 1)), "1 are torn"),
    "a message that is visible twice": (
        lambda h: replace(h, visible=[*h.visible, h.visible[-1]]),
        "1 are visible more than once",
    ),
    "a message that was rolled back": (lambda h: replace(h, sent=h.sent[:-1]), "1 are visible and never committed"),
    "a message before its time": (
        lambda h: replace(
            h, visible=[record._replace(appended_s=48.0) if record.name == "sql.10" else record for record in h.visible]
        ),
        "1 are visible before their time",
    ),
    "halves out of order": (with_swapped_halves, "1 are visible out of the order of their halves"),
    "a row that is missing": (
        lambda h: replace(h, stored=dict(list((h.stored or {}).items())[1:])),
        "1 are visible and",
    ),
    "a row of nothing": (lambda h: replace(h, stored={**(h.stored or {}), "nobody/0": 1}), "1 have a row that nobody"),
    "a row that counts twice": (lambda h: replace(h, stored={**(h.stored or {}), "kafka.1/0": 2}), "1 are stored more"),
    "a standstill": (standing_still, "workers stood still for 602 s"),
}


def test_a_history_with_a_killed_worker_and_repeated_calls_has_no_violation() -> None:
    assert violations(good()) == []


@pytest.mark.parametrize("planted", PLANTED)
def test_each_planted_violation_is_found_and_no_other(planted: str) -> None:
    plant, expected = PLANTED[planted]

    found = violations(plant(good()))

    assert len(found) == 1, found
    assert expected in found[0]


def test_messages_that_were_fed_twice_may_have_two_results_and_counts() -> None:
    history = good()
    again = Fed("batched", 0, 20, "batched-1", 19)

    found = violations(
        replace(
            history,
            fed=[*history.fed, again],
            calls={**history.calls, "batched": [*history.calls["batched"], called(again, "a.2", 130.0)]},
            results=[*history.results, Outcome("batched", "batched-1", 19)],
            counted=[*history.counted, 19],
        )
    )

    assert found == []


def test_a_standstill_counts_for_each_fault_that_went_on_when_it_began() -> None:
    history = replace(good(), progress={"workers": [10.0, 12.0, 45.0, 46.0], "results": [10.0, 14.0, 42.0]}, quiet=46.0)

    found = standstills(history)

    assert found == {"process killed": Standstill(33.0, "workers"), "broker frozen": Standstill(4.0, "results")}


def test_a_stream_that_ends_before_all_is_quiet_stands_still_until_then() -> None:
    history = replace(good(), progress={"workers": [1.0, 42.0]}, quiet=100.0)

    assert standstills(history)["broker frozen"] == Standstill(58.0, "workers")


def test_a_seed_draws_the_same_faults_each_time_and_each_kind_in_a_few_minutes() -> None:
    drawn = plan(7, 240)

    assert drawn == plan(7, 240)
    assert drawn != plan(8, 240)
    assert {record.kind for record in drawn} == set(KINDS)
