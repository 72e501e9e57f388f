"""Rates hold in every window of time, and nobody who waits for them is forgotten: pure, on a clock moved by hand."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import penstock
from penstock.consumer.handlers.rate_limits import Meter, Pace
from penstock.message import Message
from penstock.testing import TestApp

#: Seconds' worth of messages that may begin at once after a lull, and a message at least: what `rates` promises.
BURST_S = 0.1
#: What adding up floats may cost.
SLACK = 1e-6

RATES = st.floats(0.1, 5_000.0)
STEPS = st.lists(st.floats(0.0, 0.7), min_size=1, max_size=40)


def burst(rate: float) -> float:
    return max(1.0, rate * BURST_S)


@given(rate=RATES, steps=STEPS, greed=st.integers(1, 12))
def test_no_window_holds_more_than_the_rate_and_its_burst(rate: float, steps: list[float], greed: int) -> None:
    meter, now = Meter(rate), 100.0
    begun: list[float] = []

    for step in steps:
        now += step
        begun += [now for _ in range(greed) if meter.take(now)]

    for first, start in enumerate(begun):
        for last in range(first, len(begun)):
            assert last - first + 1 <= rate * (begun[last] - start) + burst(rate) + SLACK


@given(steps=st.lists(st.tuples(st.floats(0.0, 0.5), st.floats(-0.2, 0.0)), max_size=60))
def test_times_that_were_read_before_anothers_make_no_tokens(steps: list[tuple[float, float]]) -> None:
    meter, now = Meter(10.0), 100.0
    begun = meter.take(now)
    taken = int(begun)

    for step, late in steps:
        now += step
        # A thread that was interrupted between its look at the clock and its question.
        taken += meter.take(now) + meter.take(now + late)

    assert taken <= 10.0 * (now - 100.0) + 1 + SLACK


@given(changes=st.lists(st.tuples(st.sampled_from([0.0, 2.0, 50.0, 900.0]), st.floats(0.0, 1.0)), max_size=40))
def test_after_a_change_the_new_rate_holds_at_once(changes: list[tuple[float, float]]) -> None:
    meter, now = Meter(None), 5.0

    for rate, seconds in changes:
        meter.rate = rate
        taken = sum(meter.take(now + seconds * part / 10) for part in range(11) for _ in range(30))
        now += seconds

        assert taken <= (rate * seconds + burst(rate) + SLACK if rate else 0)


def test_a_rate_of_zero_holds_the_first_message_too() -> None:
    from_the_start, later = Meter(0), Meter(100.0)
    later.take(1.0)
    later.rate = 0

    assert not from_the_start.take(1.0)
    assert not later.take(9.0)


@given(
    rate=st.one_of(st.none(), RATES),
    arrivals=st.lists(st.integers(0, 50), min_size=1, max_size=60),
)
def test_nobody_who_waits_is_forgotten_and_who_came_first_is_woken_first(
    rate: float | None, arrivals: list[int]
) -> None:
    meter, now = Meter(0.5), 0.0
    woken: list[int] = []
    while meter.take(now):
        pass
    for arrival in arrivals:
        meter.wait(arrival, lambda arrival=arrival: woken.append(arrival))
    meter.rate = rate

    for _ in range(20 * len(arrivals)):
        due = meter.next_release(now)
        if due is None:
            break
        now = max(now, due) + SLACK
        for wake in meter.release(now):
            wake()
            meter.take(now)

    assert woken == sorted(arrivals)


@given(rate=RATES, start=st.floats(0.0, 1e6))
def test_at_the_time_that_is_told_there_is_a_token(rate: float, start: float) -> None:
    meter, now = Meter(rate), start
    meter.take(now)

    for _ in range(50):
        meter.wait(0, lambda: None)
        due = meter.next_release(now)
        assert due is not None
        # As a clock gets there that is moved by a difference.
        now += due - now
        assert len(meter.release(now)) == 1
        assert meter.take(now)


def test_a_held_meter_wakes_nobody_and_a_later_rate_wakes_all() -> None:
    meter, woken = Meter(0), []
    for lane in range(5):
        meter.wait(lane, lambda lane=lane: woken.append(lane))

    held = (meter.next_release(50.0), meter.release(50.0))
    meter.rate = None
    released = meter.release(51.0)

    assert held == (None, [])
    assert len(released) == 5


@given(rate=st.floats(0.1, 100.0), asks=st.lists(st.tuples(st.sampled_from(b"abc"), st.floats(0.0, 2.0)), max_size=80))
def test_a_key_keeps_its_pace_whatever_the_others_do(rate: float, asks: list[tuple[int, float]]) -> None:
    pace, now = Pace(rate), 10.0
    last: dict[int, float] = {}

    for key, step in asks:
        now += step
        if pace.free_at(key) <= now:
            assert key not in last or now - last[key] >= 1 / rate - SLACK
            pace.begin(key, now)
            last[key] = now
        else:
            assert now - last[key] < 1 / rate + SLACK


def test_a_key_that_waits_follows_a_pace_that_changes() -> None:
    pace = Pace(0.001)
    pace.begin(b"k", 10.0)

    slow = pace.free_at(b"k")
    pace.rate = 10.0
    quick = pace.free_at(b"k")
    pace.rate = None

    assert (slow, quick, pace.free_at(b"k")) == (pytest.approx(1010.0), pytest.approx(10.1), 0.0)


def test_keys_whose_time_has_passed_are_forgotten_and_others_are_not() -> None:
    pace = Pace(0.01)
    for number in range(30_000):
        pace.begin(number, 0.0)

    pace.begin("late", 1_000_000.0)
    for number in range(30_000):
        pace.begin(number + 100_000, 1_000_000.0)

    assert len(pace._begun) <= 50_000
    assert pace.free_at("late") > 1_000_000.0


@pytest.mark.parametrize(("limit", "each"), [({"rate": 10}, 100), ({"key_rate": 2}, 60)])
def test_a_test_app_lets_through_what_the_rate_says_however_long_it_runs(limit: dict[str, float], each: int) -> None:
    app = penstock.App("rates", bootstrap_servers="memory:0")
    begun: list[int] = []

    @app.handler("topic", **limit)  # type: ignore[arg-type] # one of two options
    def note(message: Message) -> None:
        begun.append(message.offset)

    with TestApp(app) as test:
        for number in range(900):
            test.send("topic", b"x", key=b"k%d" % (number % 3))
        test.settle()
        counts = []
        for _ in range(6):
            test.advance(10)
            counts.append(len(begun))
        test._end()

    assert all(abs(count - each * number) <= 3 for number, count in enumerate(counts, 1))
