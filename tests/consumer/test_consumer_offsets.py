"""Where a group begins, and what commit metadata says.

That a real broker and its client answer as the broker in memory does: `tests/testing/test_testing_conformance.py`.
"""

from __future__ import annotations

import pytest
from confluent_kafka import TopicPartition

import penstock
from penstock.errors import PenstockError
from penstock.message import Message
from penstock.offsets import encode, owner_of
from penstock.testing import TestApp, TestBroker
from support.consumers import app_of


def written(base: int, done: list[range], *, group: str = "app") -> str:
    """Return the offset map that a group writes for the partition of "t"."""
    return encode(base, done, owner=owner_of(group, "t", 0))


def committed_at(offset: int | None, metadata: str, count: int) -> TestBroker:
    """Return a broker with so many messages in "t", and a group with this commit, if any."""
    broker = TestBroker(max_fetch=5)
    broker.create_topic("t", 1)
    for number in range(count):
        broker.produce("t", b"x", key=b"k%d" % number)
    if offset is not None:
        bare = broker.consumer({"group.id": "app"})
        bare.commit(offsets=[TopicPartition("t", 0, offset, metadata=metadata)], asynchronous=False)
        bare.close()
    return broker


def noting(seen: list[int], reset: str) -> penstock.App:
    app = app_of(config={"auto.offset.reset": reset})
    app.handler("t")(lambda message: seen.append(message.offset))
    return app


def test_a_restored_map_skips_what_was_done_and_outlives_an_owner_who_did_not_get_that_far() -> None:
    first, second = list[int](), list[int]()
    app, out = app_of(max_in_flight=2, stop_timeout=1.0), list[penstock.DeferredCompletion]()

    @app.handler("t")
    def hold_the_fifth(message: Message) -> penstock.DeferredCompletion | None:
        first.append(message.offset)
        if message.offset > 5:
            return None
        out.append(penstock.DeferredCompletion())
        return out[-1]

    broker = committed_at(5, written(5, [range(6, 20), range(40, 50)]), 60)
    with TestApp(app, broker) as test:
        test.settle()
        test.stop()
        between = test.committed("t")
    with TestApp(noting(second, "earliest"), broker) as test:
        test.advance(2)
        restored = test.statistics().restored
        end = test.committed("t")

    done = {*range(6, 20), *range(40, 50), *first[1:]}
    assert (between, end) == ({0: 5}, {0: 60})
    assert set(first).isdisjoint(range(6, 20))
    assert sorted(second) == [offset for offset in range(5, 60) if offset not in done]
    assert restored == 55 - len(second)


@pytest.mark.parametrize(
    "metadata",
    [
        "p3rsomething newer",
        written(6, [range(7, 30)]),
        written(5, [range(6, 20)])[:-3],
        written(5, [range(6, 20)], group="another"),
    ],
    ids=["newer", "other offset", "cut", "other group"],
)
def test_metadata_that_cannot_be_trusted_makes_work_come_again_and_is_replaced(metadata: str) -> None:
    seen: list[int] = []
    broker = committed_at(5, metadata, 30)

    with TestApp(noting(seen, "earliest"), broker) as test:
        test.advance(2)

    assert sorted(seen) == list(range(5, 30))
    assert (broker.committed("app")["t", 0].offset, broker.committed("app")["t", 0].metadata) == (30, "")


@pytest.mark.parametrize("reset", ["earliest", "latest"])
def test_an_offset_past_the_end_follows_the_reset_policy(reset: str) -> None:
    seen: list[int] = []
    broker = committed_at(4000, written(4000, [range(4001, 4100)]), 5)

    with TestApp(noting(seen, reset), broker) as test:
        test.advance(2)
        test.send("t", "new")
        test.advance(2)
        (partition,) = test.statistics().partitions

    assert sorted(seen) == [*(range(5) if reset == "earliest" else ()), 5]
    assert (partition.watermark, partition.lag, test.committed("t")) == (6, 0, {0: 6})


@pytest.mark.parametrize(("reset", "start"), [("earliest", 10), ("latest", 10), ("latest", 20)])
def test_an_offset_below_the_start_of_the_log_goes_on_at_the_first_message_that_is_there(
    reset: str, start: int, caplog: pytest.LogCaptureFixture
) -> None:
    seen: list[int] = []
    broker = committed_at(4, written(4, [range(5, 8), range(12, 15)]), 20)
    broker.delete_records("t", 0, start)

    with TestApp(noting(seen, reset), broker) as test:
        test.advance(5)

    assert f"t:0 stood at offset 4, but its log now begins at {start}" in caplog.text
    # The group's map still tells what of the rest was done.
    assert sorted(seen) == ([10, 11, *range(15, 20)] if start == 10 else [])
    assert test.committed("t") == {0: 20}


@pytest.mark.parametrize(("offset", "start"), [(4000, 0), (1, 3), (None, 0)], ids=["above", "below", "none"])
def test_an_offset_that_is_not_in_the_log_stops_the_consumer_where_no_policy_is_allowed(
    offset: int | None, start: int, caplog: pytest.LogCaptureFixture
) -> None:
    broker = committed_at(offset, "", 5)
    broker.delete_records("t", 0, start)
    before = broker.committed("app")

    with (
        TestApp(noting([], "error"), broker) as test,
        pytest.raises(PenstockError, match=r"auto\.offset\.reset forbids another"),
    ):
        test.advance(5)

    assert broker.committed("app") == before
    assert "the consumer stops: the group's offset is not in the log" in caplog.text
