"""The series of the last half hour: the content of a point, the effect of a restart, and bounded growth."""

from __future__ import annotations

from bisect import bisect_left
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from scenes import partition, report

from penstock.consumer.latencies import BOUNDARIES_S, BUCKETS, quantile
from penstock.fleet.page.history import POINTS, History
from penstock.fleet.reports.group_state import Group, Member


def group(sequence: int, uptime_s: float, *, member: str = "one", silent: bool = False, **description: Any) -> Group:
    made = report("shop", member, uptime_s, sequence, **description)
    return Group("shop", [Member(made, 0.0, is_silent=silent)])


def counted(handled: int, *, slow: int = 0, lag: int = 7) -> dict[str, Any]:
    latencies = [0] * BUCKETS
    latencies[3], latencies[8] = handled - slow, slow
    return {
        "counts": {"handled": handled, "failed": handled // 10, "in_flight": 3},
        "partitions": [partition("orders", 1, lag=lag)],
        "latencies": {"handler": latencies, "done": latencies},
    }


def test_a_point_is_what_was_done_between_two_reports() -> None:
    history = History()
    history.add([group(1, 10.0, **counted(100))])
    history.add([group(3, 14.0, **counted(500, slow=200))])

    series = history.series("shop")

    assert (series["handled"], series["failed"], series["lag"]) == ([None, 100.0], [None, 10.0], [7.0, 7.0])
    assert series["p50"][1] == pytest.approx(0.005, rel=0.5)
    assert 0.1 < (series["p99"][1] or 0.0) <= 0.2
    assert history.series("shop", "one")["handled"] == [None, 100.0]


def test_a_member_that_started_again_or_fell_silent_makes_no_rate_of_nothing() -> None:
    history = History()
    history.add([group(9, 100.0, **counted(5_000))])
    history.add([group(1, 1.0, **counted(10))])
    history.add([group(2, 6.0, silent=True, **counted(20))])

    assert history.series("shop")["handled"] == [None, None, None]
    assert history.series("shop")["lag"] == [7.0, 7.0, None]
    # Where no report came since the last point, its own rate goes on.
    for _ in range(2):
        history.add([group(4, 60.0, rates={"handled": 50.0}, **counted(100))])
    assert history.series("shop")["handled"][-1] == 50.0


def test_half_an_hour_is_kept_and_the_rest_forgotten() -> None:
    history = History()
    for number in range(POINTS + 40):
        history.add([group(number + 1, 5.0 * number + 5, **counted(100 * number, lag=number))])

    lag = history.series("shop")["lag"]

    assert (len(lag), lag[0], lag[-1]) == (POINTS, 40.0, POINTS + 39.0)


def test_each_batch_of_a_query_is_drawn_once_and_not_more_queries_than_a_page_has_room_for() -> None:
    history = History()
    for batches in (1, 1, 2):
        sinks = [{"name": "lake", "state": "running", "batches": batches, "batch_seconds": 1.0 * batches}]
        history.add([group(1, 5.0, sinks=sinks)])

    assert history.series("shop")["batch lake"] == [1.0, None, 2.0]

    many = [{"name": f"q{n}", "state": "running", "batches": 1, "batch_seconds": 1.0} for n in range(100)]
    history.add([group(1, 5.0, sinks=many)])

    assert len(history.series("shop")) == 21


def test_a_flood_of_members_and_groups_stays_bounded_and_groups_keep_their_series_longest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("penstock.fleet.page.history._MOST_KEPT", 20)
    history = History()
    for number in range(200):
        description = report(f"g{number}", "one", 5.0, 1)
        history.add([Group(f"g{number}", [Member(description, 0.0, is_silent=False)])])

    assert sum(bool(history.series(f"g{number}")) for number in range(200)) == 10

    for sequence in (1, 2):
        members = [report("shop", f"m{n}", 5.0 * sequence, sequence, **counted(100 * sequence)) for n in range(40)]
        history.add([Group("shop", [Member(each, 0.0, is_silent=False) for each in members])])

    assert history.series("shop")["handled"] == [None, 800.0]
    assert history.series("shop", "m39")["handled"] == [None, 20.0]
    assert history.series("shop", "m0") == {}


@given(st.lists(st.floats(0.0, 400.0), min_size=1, max_size=200), st.sampled_from([0.5, 0.9, 0.99]))
def test_a_quantile_lies_in_the_bucket_of_the_true_one(seconds: list[float], part: float) -> None:
    counts = [0] * BUCKETS
    for duration in seconds:
        counts[bisect_left(BOUNDARIES_S, duration)] += 1
    true = sorted(seconds)[max(0, -(-int(part * 100) * len(seconds) // 100) - 1)]

    found = quantile(counts, part)

    assert found is not None
    assert quantile([], part) is quantile([0.0] * BUCKETS, part) is None
    ends = (0.0, *BOUNDARIES_S)
    bucket = bisect_left(BOUNDARIES_S, true)
    assert ends[bucket] - 1e-9 <= found <= ends[min(bucket + 1, BUCKETS - 1)] + 1e-9
