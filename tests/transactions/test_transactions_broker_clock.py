"""The broker's time as append times tell it: one record that is ahead does not move it for good."""

from __future__ import annotations

import time

import pytest
from confluent_kafka import Producer
from transaction_tools import Bench, prepared

from penstock.transactions import TransactionState
from penstock.transactions.core.clock import BrokerClock
from penstock.transactions.wire.half import Half, encode_half
from penstock.transactions.wire.ids import new_id
from waiting import wait_until

HOUR_MS = 3_600_000


def test_the_newest_append_time_moves_it_and_then_the_monotonic_clock() -> None:
    clock = BrokerClock()
    assert clock.now_ms(5.0) == 0

    assert clock.saw(1_000, 5.0) == 1_000
    assert clock.saw(900, 5.1) == 900, "of a log that lags behind"
    assert clock.now_ms(6.0) == 2_000
    assert clock.saw(10_000, 7.0) == 10_000, "what was read before was old"
    assert clock.now_ms(7.5) == 10_500


def test_what_cannot_be_undone_waits_for_a_mark_but_not_for_ever() -> None:
    clock = BrokerClock()
    clock.saw(HOUR_MS, 5.0)

    assert clock.sure_ms(6.0) == 0
    assert clock.sure_ms(40.0) == clock.now_ms(40.0)
    clock.marked(1_000, sent=41.0, acknowledged=41.0)
    assert clock.sure_ms(41.0) == 1_000


def test_a_mark_of_our_own_sets_it_back_where_a_record_was_ahead() -> None:
    clock = BrokerClock()
    clock.saw(HOUR_MS, 5.0)

    clock.marked(1_000, sent=5.0, acknowledged=5.1)

    assert clock.now_ms(5.1) == 1_000
    assert clock.now_ms(6.1) == 2_000
    assert clock.saw(2_050, 6.1) == 2_050


def test_what_is_ahead_of_the_newest_mark_is_not_believed_until_another_mark_says_so() -> None:
    clock = BrokerClock()
    clock.marked(1_000, sent=5.0, acknowledged=5.0)

    assert clock.saw(HOUR_MS, 6.0) == 2_000, "it counts as of now"
    assert clock.is_disputed
    assert clock.now_ms(6.5) == 2_500

    # The broker's clock was set forward.
    clock.marked(HOUR_MS, sent=7.0, acknowledged=7.1)
    assert not clock.is_disputed
    assert clock.saw(HOUR_MS + 200, 7.2) == HOUR_MS + 200
    assert clock.now_ms(7.2) == HOUR_MS + 200


def test_a_broker_whose_clock_is_set_back_sets_it_back() -> None:
    clock = BrokerClock()
    clock.saw(HOUR_MS, 1.0)
    clock.marked(HOUR_MS + 500, sent=1.4, acknowledged=1.5)

    clock.marked(2_000, sent=3.0, acknowledged=3.1)

    assert clock.now_ms(3.1) == 2_000
    assert clock.saw(2_100, 3.2) == 2_100
    assert clock.now_ms(3.2) == 2_100


@pytest.mark.parametrize("stamped_by", [pytest.param("producer", marks=pytest.mark.thorough), "broker"])
def test_a_record_an_hour_ahead_neither_publishes_a_delayed_message_early_nor_stops_checks(
    bench: Bench, stamped_by: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[str] = []
    producer = bench.producer(check=lambda half: checked.append(half.transaction_id) or TransactionState.UNKNOWN)
    coordinator = bench.coordinator()
    producer.send(bench.topic, value=b"later", deliver_at=time.time() + 600)
    wait_until(lambda: coordinator.statistics().delayed == 1)
    if stamped_by == "producer":
        # It is set while the coordinator runs.
        bench.alter(bench.topics.half, {"message.timestamp.type": "CreateTime"})
        ahead(bench)
        wait_until(lambda: "producers' time" in caplog.text)
    else:
        see = BrokerClock.saw

        def leap(self: BrokerClock, append_ms: int, now: float) -> int:
            """One record has the time of a broker whose clock was an hour ahead for a moment."""
            monkeypatch.setattr(BrokerClock, "saw", see)
            return see(self, append_ms + HOUR_MS, now)

        monkeypatch.setattr(BrokerClock, "saw", leap)
    stored = prepared(producer, bench.topic)
    wait_until(lambda: stored.halves[0].transaction_id in checked)

    assert bench.visible() == []
    assert coordinator.statistics().delayed == 1


def ahead(bench: Bench) -> None:
    """Store a half whose producer's clock is an hour ahead."""
    half = Half(new_id(), "others", bench.topic, None, None, b"v", (), None)
    producer = Producer({"bootstrap.servers": bench.servers})
    in_an_hour = int(time.time() * 1000) + HOUR_MS
    producer.produce(bench.topics.half, b"v", None, 0, timestamp=in_an_hour, headers=list(encode_half(half)))
    assert producer.flush(30) == 0
