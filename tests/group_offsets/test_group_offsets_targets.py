from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ConfigurationError
from penstock.group_offsets.targets import Target, To, TopicChoice, chosen, target, topic_choice


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("earliest", Target(To.EARLIEST)),
        ("latest", Target(To.LATEST)),
        ("0", Target(To.OFFSET, 0)),
        ("4711", Target(To.OFFSET, 4711)),
        ("+100", Target(To.SHIFT, 100)),
        ("-100", Target(To.SHIFT, -100)),
        ("1769846400000ms", Target(To.TIME, 1_769_846_400_000)),
        ("2026-01-31T08:00:00Z", Target(To.TIME, 1_769_846_400_000)),
        ("2026-01-31T09:00:00.5+01:00", Target(To.TIME, 1_769_846_400_500)),
    ],
)
def test_a_target_is_an_end_an_offset_a_shift_or_a_time(text: str, meant: Target) -> None:
    assert target(text) == meant


@given(
    st.timedeltas(timedelta(), timedelta(days=80_000)),
    st.integers(-14 * 60, 14 * 60).map(lambda minutes: timezone(timedelta(minutes=minutes))),
)
def test_a_time_is_the_same_in_every_zone(since_1970: timedelta, zone: timezone) -> None:
    moment = datetime(1970, 1, 1, tzinfo=UTC) + since_1970

    meant = target(moment.astimezone(zone).isoformat())

    assert meant == Target(To.TIME, since_1970 // timedelta(milliseconds=1))


@pytest.mark.parametrize(
    ("text", "says"),
    [
        *((text, r"2026-01-31T0\d:00:00Z for UTC") for text in ("2026-01-31T08:00:00", "2026-01-31")),
        *((text, "--to") for text in ("", "first", "1.5", "٣", "--1", "9" * 19, "+" + "9" * 19, "1ms2")),
        ("1969-12-31T08:00:00Z", "--to"),
    ],
)
def test_what_is_no_target_and_a_time_without_a_zone_are_refused(text: str, says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        target(text)


@given(st.text(max_size=12))
def test_any_other_text_is_refused_or_understood(text: str) -> None:
    try:
        target(text)
    except ConfigurationError as refused:
        assert "--to" in str(refused)  # noqa: PT017 - most texts are refused, and some may be


def test_topics_and_partitions_are_chosen() -> None:
    choices = [topic_choice("orders:0,4-6,4"), topic_choice("payments"), topic_choice("orders:1")]

    assert choices[0] == TopicChoice("orders", frozenset([0, 4, 5, 6]))
    assert chosen(choices, {"orders": 7, "payments": 2, "other": 1}) == [
        ("orders", 0),
        ("orders", 1),
        ("orders", 4),
        ("orders", 5),
        ("orders", 6),
        ("payments", 0),
        ("payments", 1),
    ]
    with pytest.raises(ConfigurationError, match="no partition 3; its 3 are 0 to 2"):
        chosen([topic_choice("orders:2-5")], {"orders": 3})


@pytest.mark.parametrize(
    "text", ["", ":0", "orders:", "orders:x", "orders:3-1", "orders:0,,1", "orders:-1", "orders:1-"]
)
def test_a_choice_that_names_nothing_is_refused(text: str) -> None:
    with pytest.raises(ConfigurationError, match="orders:0,4-7"):
        topic_choice(text)
