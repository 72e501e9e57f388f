"""Batch handlers: how batches are gathered and handed over, and the repetitions after a failure.

Step by step: no threads, no broker, and a clock that stands; save one on threads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from itertools import count
from typing import Any

import pytest
import tenacity
from stepped_engine import ONCE_A_SECOND, SteppedEngine

from penstock.consumer import Kind, handler, retry
from penstock.consumer.lanes.slot import ExecutionSlot
from penstock.errors import BatchError, MessageFormatError
from penstock.message import Message
from penstock.testing import TestApp, TestBroker
from support.consumers import app_of, consumer_of, group_of
from waiting import wait_until

Values = list[bytes | None]


class Batches:
    """A batch handler that keeps the values of its batches and fails as it is set to."""

    def __init__(self, fail: Callable[[Values], BaseException | None] = lambda _: None) -> None:
        self.calls: list[Values] = []
        #: The attempts that the messages of each call showed.
        self.attempts: list[list[int]] = []
        self._fail = fail

    def __call__(self, messages: list[Message]) -> None:
        """Take a batch."""
        values = [message.value for message in messages]
        self.calls.append(values)
        self.attempts.append([message.attempt for message in messages])
        error = self._fail(values)
        if error is not None:
            raise error

    def sizes(self) -> list[int]:
        """Return how many messages each call had."""
        return [len(call) for call in self.calls]


def first(error: BaseException) -> Callable[[Values], BaseException | None]:
    """Return a handler that fails only the first batch, with this error."""
    errors = [error]
    return lambda _: errors.pop() if errors else None


def values(numbers: Iterable[int]) -> Values:
    return [b"%d" % number for number in numbers]


def of_one_key(count: int) -> list[tuple[bytes | None, bytes | None]]:
    return [(b"k", value) for value in values(range(count))]


def of_keys(count: int, keys: int) -> list[tuple[bytes | None, bytes | None]]:
    return [(b"k%d" % (number % keys), b"%d" % number) for number in range(count)]


def names(*bad: bytes) -> Callable[[Values], BaseException | None]:
    """Return what names the first of the bad ones in a batch."""

    def fail(batch: Values) -> BaseException | None:
        found = {place: ValueError() for place, value in enumerate(batch) if value in bad}
        return BatchError(found) if found else None

    return fail


def test_a_batch_that_is_not_full_waits_for_linger_and_a_full_one_does_not() -> None:
    seen = Batches()
    stepped = SteppedEngine({"t": handler(seen, batch=3, linger=10)})

    stepped.feed("t", (b"k", b"1"), (b"k", b"2"))
    stepped.serve()
    stepped.pass_time(9)
    waiting = list(seen.calls)
    stepped.feed("t", (b"k", b"3"), (b"k", b"4"))
    stepped.serve()
    full = list(seen.calls)
    stepped.pass_time(9)
    not_yet = list(seen.calls)
    stepped.pass_time(1.1)

    assert waiting == []
    assert full == not_yet == [[b"1", b"2", b"3"]]
    assert seen.calls == [[b"1", b"2", b"3"], [b"4"]]


def test_a_drain_that_begins_while_a_batch_decides_to_wait_is_not_missed() -> None:
    seen = Batches()
    stepped = SteppedEngine({"t": handler(seen, batch=3, linger=10)})
    stepped.feed("t", (b"k", b"1"))
    lane = stepped.engine.scheduler.take(0)
    assert lane is not None
    processor = stepped.engine.processor

    with pytest.raises(StopIteration):
        processor.process(lane, ExecutionSlot(Kind.THREAD, "deciding")).send(None)
    # The drain sets its mark and finds the lane held.
    processor.drain()
    stepped.engine.scheduler.give_back(lane)
    stepped.serve()

    assert seen.calls == [[b"1"]]


@pytest.mark.parametrize(
    ("kind", "two_topics", "partitions", "order"),
    [
        ("plain", False, 4, "key"),
        ("plain", True, 4, "key"),
        ("plain", False, 1, "key"),
        ("plain", False, 4, "partition"),
        ("async", False, 4, "key"),
        ("async", True, 4, "key"),
    ],
)
def test_batches_are_filled_within_linger_whatever_else_the_app_handles(
    kind: str, two_topics: bool, partitions: int, order: str
) -> None:
    app, sizes, keys = app_of(), list[int](), count()

    def plain(messages: list[Message]) -> None:
        sizes.append(len(messages))

    async def awaited(messages: list[Message]) -> None:
        plain(messages)

    app.handler("t", batch=100, linger=0.5, order=order)(plain if kind == "plain" else awaited)
    if two_topics:
        app.handler("u")(lambda _message: None)
    with TestApp(app, partitions=partitions) as test:
        # 3,000 messages a second.
        for _ in range(30):
            for _ in range(120):
                for topic in ("t", "u") if two_topics else ("t",):
                    test.send(topic, b"x", key=b"k%d" % next(keys))
            test.advance(0.04)
        found = list(sizes)

    assert sum(found) >= 2_000
    assert sum(found) / len(found) >= 50


def test_batches_of_one_partition_as_transactions_want_them_wait_side_by_side() -> None:
    seen = Batches()
    stepped = SteppedEngine({"t": handler(seen, batch=3, linger=10)})
    stepped.engine.processor.set_aside._one_partition = True
    stepped.assign("t", partition=1)
    for value in (b"1", b"2"):
        stepped.feed("t", (b"a", value))
        stepped.feed("t", (b"b", value), partition=1)
        stepped.serve()
    early = list(seen.calls)

    stepped.pass_time(10.1)

    assert (early, seen.calls) == ([], [[b"1", b"2"]] * 2)


def test_a_revocation_waits_for_a_batch_that_has_messages_of_its_partition_too() -> None:
    def look(_messages: list[Message]) -> None:
        busy.extend(stepped.engine.processor.busy_with(stepped.slots, [stepped.of("t", partition=1)]))

    busy: list[str] = []
    stepped = SteppedEngine({"t": handler(look, batch=2)})
    stepped.assign("t", partition=1)
    stepped.feed("t", (b"a", b"1"))
    stepped.feed("t", (b"b", b"2"), partition=1)
    stepped.serve()

    assert busy == ["slot-0"]
    assert stepped.engine.processor.busy_with(stepped.slots, [stepped.of("t", partition=1)]) == []


def test_a_batch_leaves_out_what_was_revoked_while_it_was_gathered() -> None:
    def revoke(value: bytes) -> bytes:
        if value == b"3":
            stepped.revoke("t", partition=0)
        return value

    seen = Batches()
    stepped = SteppedEngine({"t": handler(seen, batch=3, decoder=revoke)})
    stepped.assign("t", partition=1)
    stepped.feed("t", (b"a", b"1"), (b"b", b"2"))
    stepped.feed("t", (b"c", b"3"), partition=1)
    stepped.serve()

    assert seen.calls == [[b"3"]]
    assert stepped.of("t", partition=1).tracker.in_flight == 0


def test_what_waits_for_a_rate_waits_for_more_of_its_batch_too() -> None:
    seen = Batches()
    stepped = SteppedEngine({"t": handler(seen, batch=3, linger=10, rate=0)})
    bucket = stepped.engine.routes["t"].token_bucket
    stepped.feed("t", *of_one_key(3))
    stepped.serve()

    bucket.rate = None
    stepped.feed("t", (b"k", b"3"))
    for wake in bucket.release(stepped.clock.monotonic()):
        wake()
    stepped.serve()
    at_once = list(seen.calls)
    stepped.pass_time(10.1)

    assert at_once == [values(range(3))]
    assert seen.calls == [values(range(3)), [b"3"]]


@pytest.mark.parametrize(
    ("failed", "count"),
    [
        *((failed, 3) for failed in ({}, {7: ValueError()}, {-1: ValueError()}, {"1": ValueError()}, {1.5: None})),
        ({0: ValueError(), 7: ValueError()}, 3),
        *(({0: reason}, 1) for reason in (None, "words", 3)),
    ],
    ids=str,
)
def test_a_batch_error_may_give_any_reason_and_fails_all_where_it_names_what_is_not_there(
    failed: dict[int, BaseException], count: int
) -> None:
    seen = Batches(first(BatchError(failed)))
    stepped = SteppedEngine({"t": handler(seen, batch=10, retry=ONCE_A_SECOND)})

    stepped.feed("t", (b"a", b"a1"), (b"b", b"b1"), (b"c", b"c1"))
    stepped.serve()
    in_flight = stepped.of("t").tracker.in_flight
    stepped.pass_time(1)

    assert stepped.failures == []
    assert in_flight == count
    assert seen.calls == [[b"a1", b"b1", b"c1"], [b"a1", b"b1", b"c1"][:count]]
    assert stepped.of("t").tracker.in_flight == 0


@pytest.mark.parametrize(
    ("options", "calls"),
    [
        ({"decoder": "json", "on_failure": "drop"}, [[b"1"], [b"1"], [b"3"]]),
        ({"key_rate": 0.1}, [[b"1"], [b"1"], [b"not json"], [b"3"]]),
    ],
    ids=["it cannot be decoded", "it is not due by its rate"],
)
def test_a_batch_that_fails_keeps_the_order_of_a_key_whose_later_message_cannot_be_handed_over(
    options: dict[str, Any], calls: list[Values]
) -> None:
    seen = Batches(first(ValueError("all of it")))
    stepped = SteppedEngine({"t": handler(seen, batch=10, retry=ONCE_A_SECOND, **options)})

    stepped.feed("t", (b"k", b"1"), (b"k", b"not json"), (b"k", b"3"))
    stepped.serve()
    for _ in range(60):
        stepped.pass_time(1)

    assert seen.calls == calls
    assert stepped.of("t").tracker.in_flight == 0


@pytest.mark.parametrize("keys", [1, 7, 100])
def test_a_batch_that_failed_whole_is_tried_again_whole(keys: int) -> None:
    away = True
    seen = Batches(lambda _: ConnectionError() if away else None)
    stepped = SteppedEngine({"t": handler(seen, batch=100, retry=retry(100, wait=tenacity.wait_random(0.5, 1)))})

    stepped.feed("t", *of_keys(500, keys))
    stepped.serve()
    for _ in range(4):
        stepped.pass_time(1)
    while_away = len(seen.calls)
    away = False
    for _ in range(3):
        stepped.pass_time(1)

    # Five batches, or the first where all are of one key, at most once a second.
    assert while_away <= 5 * 5
    assert sum(seen.sizes()) == 100 * len(seen.calls)
    assert len(seen.calls) - while_away <= 5
    assert stepped.of("t").tracker.in_flight == 0
    assert stepped.of("t").tracker.parked == (0, 0)
    for key in range(keys):
        mine = [value for call in seen.calls[while_away:] for value in call if value is not None]
        of_key = [int(value) for value in mine if int(value) % keys == key]
        assert of_key == sorted(of_key)


@pytest.mark.parametrize("tries", [3, 1])
def test_of_a_batch_that_fails_whole_to_the_end_only_what_fails_alone_is_given_up(tries: int) -> None:
    error = ValueError() if tries > 1 else MessageFormatError("no number")  # which is not tried again
    seen = Batches(lambda batch: error if b"5" in batch else None)
    stepped = SteppedEngine({"t": handler(seen, batch=10, retry=ONCE_A_SECOND, on_failure="dead_letter")})

    stepped.feed("t", *of_one_key(30))
    stepped.serve()
    for _ in range(10):
        stepped.pass_time(1)
    stepped.write_out()

    assert seen.calls[:tries] == [values(range(10))] * tries
    # Then each for itself; the bad one by the policy.
    alone = [*range(5), *[5] * tries, *range(6, 10)]
    assert seen.calls[tries:] == [*([value] for value in values(alone)), values(range(10, 20)), values(range(20, 30))]
    attempts = [*[tries + 1] * 6, *range(tries + 2, 2 * tries + 1), tries + 1]
    assert seen.attempts[tries - 1 : 2 * tries + 6] == [[tries] * 10, *([attempt] for attempt in attempts)]
    assert stepped.deliveries.sent == [("dlq.t", b"5")]
    assert stepped.of("t").tracker.in_flight == 0


def test_an_undecodable_value_ends_its_batch_and_those_behind_it_come_in_batches() -> None:
    def decode(value: bytes) -> bytes:
        if value == b"3":
            raise ValueError
        return value

    seen = Batches()
    stepped = SteppedEngine({"t": handler(seen, batch=100, decoder=decode, on_failure="dead_letter")})

    stepped.feed("t", *of_one_key(250))
    stepped.serve()
    stepped.write_out()

    assert seen.calls == [values(range(3)), values(range(4, 104)), values(range(104, 204)), values(range(204, 250))]
    assert stepped.deliveries.sent == [("dlq.t", b"3")]
    assert stepped.of("t").tracker.in_flight == 0


@pytest.mark.parametrize(
    ("order", "again"),
    [
        # Behind the failed one in its line, and so handled once more, after it.
        ("partition", list(range(3, 100))),
        ("key", [number for number in range(3, 100) if number % 4 == 3]),
        # Nothing waits for another: only the failed one.
        ("none", [3]),
    ],
)
def test_of_a_batch_that_names_a_failed_message_those_behind_it_in_its_line_come_again_after_it(
    order: str, again: list[int]
) -> None:
    seen = Batches(first(BatchError({3: ValueError()})))
    stepped = SteppedEngine({"t": handler(seen, batch=100, order=order, retry=ONCE_A_SECOND)})

    stepped.feed("t", *of_keys(100, 4))
    stepped.serve()
    done_at_once = stepped.count("handled")
    stepped.pass_time(1)

    assert seen.calls[0] == values(range(100))
    assert done_at_once == 100 - len(again)
    assert [call for call in seen.calls[1:] if call] == [
        call for call in (values(again[:1]), values(again[1:])) if call
    ]
    assert (stepped.of("t").tracker.in_flight, stepped.count("handled")) == (0, 100)


def test_what_a_batch_of_waiting_messages_names_is_given_up_in_its_turn() -> None:
    seen = Batches(names(b"1", b"6"))
    stepped = SteppedEngine(
        {"t": handler(seen, batch=10, retry=retry(2, wait=tenacity.wait_fixed(1)), on_failure="drop")}
    )

    stepped.feed("t", *of_one_key(12))
    stepped.serve()
    for _ in range(3):
        stepped.pass_time(1)

    # What is behind the second comes a third time: it was behind the first too.
    assert seen.calls == [values(range(10)), [b"1"], values(range(2, 12)), [b"6"], values(range(7, 12))]
    assert stepped.count("dropped") == 2
    assert (stepped.of("t").tracker.in_flight, stepped.of("t").tracker.parked) == (0, (0, 0))


def test_a_retried_batch_keeps_the_order_in_which_messages_of_a_key_came_whatever_their_partitions() -> None:
    # One key in two topics; by their offsets those of the second would go before.
    seen = Batches(first(ConnectionError()))
    one = handler(seen, batch=3, retry=ONCE_A_SECOND)
    stepped = SteppedEngine({"t": one, "u": one})
    stepped.assign("t", start=5)

    stepped.feed("t", (b"k", b"t5"), (b"k", b"t6"))
    stepped.serve()
    stepped.feed("u", (b"k", b"u0"), (b"k", b"u1"))
    stepped.serve()
    stepped.pass_time(1)

    assert seen.calls == [[b"t5", b"t6"], [b"t5", b"t6"], [b"u0", b"u1"]]
    assert (stepped.of("t").tracker.in_flight, stepped.of("u").tracker.in_flight) == (0, 0)


def test_what_waits_for_more_of_its_batch_is_not_overtaken_by_another_handler_of_its_keys() -> None:
    calls: list[object] = []
    stepped = SteppedEngine(
        {
            "t": handler(
                lambda batch: calls.append([message.value for message in batch]), batch=9, linger=10, key_space="k"
            ),
            "u": handler(lambda one: calls.append(one.value), key_space="k"),
        }
    )

    stepped.feed("t", (b"k", b"1"))
    stepped.serve()
    waiting = list(calls)
    stepped.feed("u", (b"k", b"2"))
    stepped.feed("t", (b"k", b"3"))
    stepped.serve()
    stepped.pass_time(10.1)

    assert waiting == []
    assert calls == [[b"1"], b"2", [b"3"]]


def test_of_a_batch_that_comes_again_smaller_the_rest_keeps_its_tries() -> None:
    seen = Batches(lambda batch: ValueError() if b"0" in batch else None)
    stepped = SteppedEngine({"t": handler(seen, batch=4, rate=1, retry=ONCE_A_SECOND, on_failure="drop")})
    bucket = stepped.engine.routes["t"].token_bucket
    # There is a token for the first alone when it is tried again.
    for rate in (None, 1, None):
        bucket.rate = rate
        if not seen.calls:
            stepped.feed("t", *of_one_key(4))
        stepped.pass_time(1)

    assert seen.attempts == [[1] * 4, [2], [3], [2] * 3]


def test_what_came_behind_a_batch_that_failed_and_fails_itself_holds_its_own_key_alone() -> None:
    down = True
    seen = Batches(lambda batch: ValueError() if down or b"a2" in batch else None)
    stepped = SteppedEngine({"t": handler(seen, batch=10, retry=ONCE_A_SECOND, on_failure="hold")})
    stepped.feed("t", (b"a", b"a1"), (b"b", b"b1"))
    stepped.serve()
    stepped.feed("t", (b"a", b"a2"))
    stepped.serve()
    down = False
    stepped.pass_time(1)

    stepped.feed("t", (b"b", b"b2"))
    stepped.serve()
    before_its_tries_are_over = list(seen.calls)
    stepped.pass_time(1)
    stepped.pass_time(1)
    stepped.feed("t", (b"b", b"b3"), (b"a", b"a3"))
    stepped.serve()

    assert before_its_tries_are_over == [[b"a1", b"b1"], [b"a1", b"b1"], [b"a2"], [b"b2"]]
    assert seen.calls[4:] == [[b"a2"], [b"a2"], [b"b3"]]


def test_mates_of_a_batch_that_failed_whole_go_with_their_partition() -> None:
    away = True
    seen = Batches(lambda _: ConnectionError() if away else None)
    stepped = SteppedEngine({"t": handler(seen, batch=10, retry=ONCE_A_SECOND)})
    stepped.feed("t", *of_keys(10, 5))
    stepped.serve()

    stepped.revoke("t")
    stepped.serve()
    away = False
    stepped.assign("t", start=10)
    stepped.feed("t", *of_keys(10, 5))
    stepped.serve()
    stepped.pass_time(5)

    assert seen.calls == [values(range(10))] * 2
    assert stepped.engine.scheduler.lanes[0].parked == {}


def test_what_is_left_of_a_batch_that_fails_as_its_head_is_revoked_is_tried_by_its_policy() -> None:
    def revoke(_batch: Values) -> BaseException:
        stepped.revoke("t")
        return ConnectionError()

    seen = Batches(revoke)
    stepped = SteppedEngine({"t": handler(seen, batch=2, retry=ONCE_A_SECOND, on_failure="drop")})
    stepped.assign("t", partition=1)
    stepped.feed("t", (b"a", b"1"))
    stepped.feed("t", (b"b", b"2"), partition=1)
    stepped.serve()
    calls = [len(seen.calls)]
    for _ in range(2):
        stepped.pass_time(1)
        calls.append(len(seen.calls))

    assert calls == [1, 2, 3]
    assert seen.calls == [[b"1", b"2"], [b"2"], [b"2"]]
    assert (stepped.count("dropped"), stepped.of("t", partition=1).tracker.in_flight) == (1, 0)


def test_on_threads_batches_of_a_key_keep_its_order_and_a_drain_hands_over_what_waits_for_more() -> None:
    broker, lists, lock = TestBroker(), list[list[Message]](), threading.Lock()
    broker.create_topic("t", 1)
    for number in range(1000):
        broker.produce("t", b"x", key=b"k%d" % (number % 5))

    def keep(messages: list[Message]) -> None:
        with lock:
            lists.append(messages)

    # What comes before the stop comes because it is full.
    consumer = consumer_of(broker, {"t": handler(keep, batch=30, linger=1e6)}, stop_timeout=1e6).start()
    wait_until(lambda: consumer.statistics().received == 1000 and consumer.statistics().ready_lanes == 0)
    wait_until(lambda: consumer.statistics().busy_workers == 0)
    full = [len(messages) for messages in list(lists)]
    drained = consumer.stop()

    offsets: dict[bytes | None, list[int]] = {}
    for message in (message for messages in lists for message in messages):
        offsets.setdefault(message.key, []).append(message.offset)
    assert full
    assert set(full) == {30}
    assert drained
    assert all(found == sorted(set(found)) for found in offsets.values())
    assert sum(map(len, offsets.values())) == 1000
    assert broker.committed(group_of("t"))["t", 0].offset == 1000
