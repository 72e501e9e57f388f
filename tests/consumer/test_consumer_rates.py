"""Rates hold in every window of time, and no waiting lane is forgotten: pure, on a clock moved by hand."""

from __future__ import annotations

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.consumer.handlers.rate_limits import KeyRateLimiter, TokenBucket

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
    token_bucket, now = TokenBucket(rate), 100.0
    begun: list[float] = []

    for step in steps:
        now += step
        begun += [now for _ in range(greed) if token_bucket.take(now)]

    for first, start in enumerate(begun):
        for last in range(first, len(begun)):
            assert last - first + 1 <= rate * (begun[last] - start) + burst(rate) + SLACK


@given(steps=st.lists(st.tuples(st.floats(0.0, 0.5), st.floats(-0.2, 0.0)), max_size=60))
def test_times_that_were_read_before_anothers_make_no_tokens(steps: list[tuple[float, float]]) -> None:
    token_bucket, now = TokenBucket(10.0), 100.0
    begun = token_bucket.take(now)
    taken = int(begun)

    for step, late in steps:
        now += step
        # A thread that was interrupted between its look at the clock and its question.
        taken += token_bucket.take(now) + token_bucket.take(now + late)

    assert taken <= 10.0 * (now - 100.0) + 1 + SLACK


@given(changes=st.lists(st.tuples(st.sampled_from([0.0, 2.0, 50.0, 900.0]), st.floats(0.0, 1.0)), max_size=40))
def test_after_a_change_the_new_rate_holds_at_once(changes: list[tuple[float, float]]) -> None:
    token_bucket, now = TokenBucket(None), 5.0

    for rate, seconds in changes:
        token_bucket.rate = rate
        taken = sum(token_bucket.take(now + seconds * part / 10) for part in range(11) for _ in range(30))
        now += seconds

        assert taken <= (rate * seconds + burst(rate) + SLACK if rate else 0)


@given(
    rate=st.one_of(st.none(), RATES),
    arrivals=st.lists(st.integers(0, 50), min_size=1, max_size=60),
)
def test_no_waiting_lane_is_forgotten_and_the_first_one_is_woken_first(rate: float | None, arrivals: list[int]) -> None:
    token_bucket, now = TokenBucket(0.5), 0.0
    woken: list[int] = []
    while token_bucket.take(now):
        pass
    for arrival in arrivals:
        token_bucket.wait(arrival, lambda arrival=arrival: woken.append(arrival))
    token_bucket.rate = rate

    for _ in range(20 * len(arrivals)):
        due = token_bucket.next_release(now)
        if due is None:
            break
        now = max(now, due) + SLACK
        for wake in token_bucket.release(now):
            wake()
            token_bucket.take(now)

    assert woken == sorted(arrivals)


@given(rate=RATES, start=st.floats(0.0, 1e6))
def test_at_the_time_that_is_reported_there_is_a_token(rate: float, start: float) -> None:
    token_bucket, now = TokenBucket(rate), start
    token_bucket.take(now)

    for _ in range(50):
        token_bucket.wait(0, lambda: None)
        due = token_bucket.next_release(now)
        assert due is not None
        # As a clock gets there that is moved by a difference.
        now += due - now
        assert len(token_bucket.release(now)) == 1
        assert token_bucket.take(now)


@pytest.mark.parametrize("rate", [None, inf])
def test_a_held_bucket_wakes_no_lane_and_a_later_rate_wakes_all(rate: float | None) -> None:
    token_bucket = TokenBucket(0)
    for lane in range(5):
        token_bucket.wait(lane, int)

    assert (token_bucket.next_release(50.0), token_bucket.release(50.0)) == (None, [])
    token_bucket.rate = rate

    assert len([*token_bucket.release(51.0), *token_bucket.release(52.0)]) == 5


@given(rate=st.floats(0.1, 100.0), asks=st.lists(st.tuples(st.sampled_from(b"abc"), st.floats(0.0, 2.0)), max_size=80))
def test_a_key_keeps_its_rate_whatever_the_others_do(rate: float, asks: list[tuple[int, float]]) -> None:
    key_rate_limiter, now = KeyRateLimiter(rate), 10.0
    last: dict[int, float] = {}

    for key, step in asks:
        now += step
        if key_rate_limiter.free_at(key) <= now:
            assert key not in last or now - last[key] >= 1 / rate - SLACK
            key_rate_limiter.begin(key, now)
            last[key] = now
        else:
            assert now - last[key] < 1 / rate + SLACK


def test_a_key_that_waits_follows_a_rate_that_changes() -> None:
    key_rate_limiter = KeyRateLimiter(0.001)
    key_rate_limiter.begin(b"k", 10.0)

    slow = key_rate_limiter.free_at(b"k")
    key_rate_limiter.rate = 10.0
    quick = key_rate_limiter.free_at(b"k")
    key_rate_limiter.rate = None

    assert (slow, quick, key_rate_limiter.free_at(b"k")) == (pytest.approx(1010.0), pytest.approx(10.1), 0.0)
