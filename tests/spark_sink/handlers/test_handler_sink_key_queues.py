"""What becomes of a task's messages: retries, their bounds, filters, decoders and batches, on a test's clock."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from key_queue_rows import Letters, queues_of, row, waits

from penstock.consumer import DeferredCompletion, handler, retry
from penstock.consumer.handlers.route import Failed
from penstock.errors import BatchError, PenstockError, RetryLater, SinkError
from penstock.message import DecodedMessage, Message, Record
from penstock.spark_sink.sinks.handlers.execution import runners
from penstock.spark_sink.sinks.handlers.execution.key_queues import KeyQueues


class Bench:
    """A clock that `sleep` moves, and a handler that fails as told and writes down what it is given."""

    def __init__(self, failing: Mapping[int, int] | None = None) -> None:
        self.now = 0.0
        self.slept: list[float] = []
        self.failing = dict(failing or {})
        self.seen: list[tuple[float, int]] = []

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds

    def time(self) -> float:
        return self.now

    def __call__(self, message: Message) -> None:
        self.seen.append((self.now, message.offset))
        if self.failing.get(message.offset, 0) > 0:
            self.failing[message.offset] -= 1
            raise RuntimeError("not yet")

    def run(
        self, rows: list[Record], letters: Letters | None = None, *, max_parked: int = 1000, **options: Any
    ) -> KeyQueues:
        queues, _ = queues_of(rows, {"orders": handler(self, **options)}, letters, max_parked=max_parked)
        runners.run(queues, self.time, self.sleep)
        return queues


def test_a_parked_key_delays_no_other_key() -> None:
    bench = Bench({0: 2})

    bench.run([row(b"a", 0), row(b"b", 1), row(b"a", 2), row(b"c", 3)], retry_policy=waits(5.0))

    assert bench.seen == [(0, 0), (0, 1), (0, 3), (5, 0), (10, 0), (10, 2)]


@pytest.mark.parametrize(
    ("key_space", "order"), [(None, ["user", "order", "user"]), ("customer", ["user", "user", "order"])]
)
def test_a_parked_key_delays_the_key_of_another_handler_only_where_they_share_a_key_space(
    key_space: str | None, order: list[str]
) -> None:
    bench = Bench({0: 1})
    seen: list[str] = []

    def users(message: Message) -> None:
        seen.append("user")
        bench(message)

    handlers = {
        "users": handler(users, key_space=key_space, retry_policy=waits(5.0)),
        "orders": handler(lambda _: seen.append("order"), key_space=key_space),
    }
    queues, _ = queues_of([row(b"42", 0, "users"), row(b"42", 1, "orders")], handlers)

    runners.run(queues, bench.time, bench.sleep)

    assert seen == order


def test_at_the_bound_the_task_waits_for_the_earliest_retry_and_takes_nothing_in() -> None:
    bench = Bench({0: 1})

    bench.run([row(b"a", 0), row(b"a", 1), row(b"b", 2)], max_parked=2, retry_policy=waits(5.0))

    assert bench.seen == [(0, 0), (5, 0), (5, 1), (5, 2)]


def test_the_bound_counts_bytes_too() -> None:
    bench = Bench({0: 1})
    rows = [row(b"a", 0, value=b"x" * 2000), row(b"b", 1, value=b"x")]
    queues, taken = queues_of(rows, {"orders": handler(bench, retry_policy=waits())}, max_parked_bytes=2000)
    call = queues.next(0)
    assert call is not None

    queues.complete(call, Failed(RuntimeError("no")), 0)

    assert queues.next(0) is None
    assert next(taken).offset() == 1


def test_a_value_that_is_empty_is_a_message_like_others() -> None:
    bench = Bench()

    queues = bench.run([row(b"a", 0, value=b""), row(b"b", 1, value=b"")])

    assert [offset for _, offset in bench.seen] == [0, 1]
    assert queues.counts.rows == 2


def test_retry_later_says_when_and_the_policy_says_how_often() -> None:
    bench = Bench()
    letters = Letters()

    def later(message: Message) -> None:
        bench(message)
        raise RetryLater(7.0)

    queues, _ = queues_of(
        [row(b"a", 0)], {"orders": handler(later, retry_policy=waits(), on_failure="dead_letter")}, letters
    )
    runners.run(queues, bench.time, bench.sleep)

    assert bench.seen == [(0, 0), (7, 0), (14, 0)]
    assert (letters.places, letters.attempts) == ([("orders", 0)], [3])
    assert (queues.counts.failed, queues.counts.retried, queues.counts.dead_letters) == (3, 2, 1)


def test_a_message_that_fails_for_good_fails_the_task_where_its_handler_stops_and_names_its_place() -> None:
    bench = Bench({4: 99})

    with pytest.raises(
        SinkError, match=r"orders\[0\]@4 2 times, last with RuntimeError.*the batch comes again"
    ) as told:
        bench.run([row(b"secret", 4)], retry_policy=waits(attempts=2))

    assert "secret" not in str(told.value)


def test_a_value_that_cannot_be_decoded_is_never_tried_again() -> None:
    letters = Letters()
    bench = Bench()

    queues = bench.run(
        [row(b"a", 0, value=b"{"), row(b"a", 1, value=b"{}")], letters, decoder="json", on_failure="dead_letter"
    )

    assert letters.places == [("orders", 0)]
    assert [offset for _, offset in bench.seen] == [1]
    assert queues.counts.failed == 1


def test_a_decoded_body_is_what_the_handler_finds_at_each_try() -> None:
    bodies: list[object] = []

    def look(message: Message) -> None:
        assert isinstance(message, DecodedMessage)
        bodies.append(message.body)
        if len(bodies) == 1:
            raise RuntimeError("once more")

    bench = Bench()
    queues, _ = queues_of([row(b"a", 0, value=b"[1]")], {"orders": handler(look, decoder="json", retry_policy=waits())})
    runners.run(queues, bench.time, bench.sleep)

    assert bodies == [[1], [1]]


def test_a_key_function_that_fails_costs_its_message_and_no_other() -> None:
    letters = Letters()
    bench = Bench()

    def key(message: Message) -> bytes:
        if message.offset == 0:
            raise KeyError("name")
        return b"k"

    bench.run([row(b"a", 0), row(b"a", 1)], letters, key=key, on_failure="dead_letter")

    assert letters.places == [("orders", 0)]
    assert [offset for _, offset in bench.seen] == [1]


def test_a_filter_that_fails_is_asked_again_and_one_that_refuses_is_counted() -> None:
    asked: list[int] = []

    def wanted(message: Message) -> bool:
        asked.append(message.offset)
        if asked == [0]:
            raise RuntimeError("not ready")
        return message.offset != 1

    bench = Bench()
    queues = bench.run([row(b"a", 0), row(b"b", 1)], filter=wanted, retry_policy=waits())

    assert asked == [0, 1, 0]
    assert bench.seen == [(1, 0)]
    assert (queues.counts.filtered, queues.counts.handled) == (1, 1)


def test_a_policy_that_raises_fails_the_task_in_a_sentence() -> None:
    def broken(_: object) -> float:
        raise ZeroDivisionError

    with pytest.raises(SinkError, match=r"retry policy of Bench.* failed with ZeroDivisionError.*orders\[0\]@0"):
        Bench({0: 1}).run([row(b"a", 0)], retry_policy=retry(wait=broken))


class Batches:
    """A batch handler that fails as told."""

    def __init__(self, *outcomes: BaseException | None) -> None:
        self.outcomes = list(outcomes)
        self.calls: list[list[int]] = []

    def __call__(self, messages: list[Message]) -> None:
        self.calls.append([message.offset for message in messages])
        outcome = self.outcomes.pop(0) if self.outcomes else None
        if outcome is not None:
            raise outcome


def run_batches(batches: Batches, rows: list[Record], **options: Any) -> KeyQueues:
    bench = Bench()
    queues, _ = queues_of(rows, {"orders": handler(batches, batch=3, retry_policy=waits(), **options)})
    runners.run(queues, bench.time, bench.sleep)
    return queues


def test_batches_are_full_while_there_are_rows_and_hold_a_key_more_than_once() -> None:
    batches = Batches()

    run_batches(batches, [row(b"a", 0), row(b"a", 1), row(b"b", 2), row(b"a", 3)])

    assert batches.calls == [[0, 1, 2], [3]]


def test_of_a_batch_that_failed_in_part_only_those_and_what_is_behind_them_come_again() -> None:
    batches = Batches(BatchError({0: RuntimeError("no")}))

    queues = run_batches(batches, [row(b"a", 0), row(b"b", 1), row(b"a", 2)])

    # The head alone, then what was behind it.
    assert batches.calls == [[0, 1, 2], [0], [2]]
    assert queues.counts.handled == 3


def test_a_batch_error_that_names_what_is_not_there_fails_the_whole_batch() -> None:
    batches = Batches(BatchError({7: RuntimeError("no")}))

    run_batches(batches, [row(b"a", 0), row(b"b", 1)])

    assert batches.calls == [[0, 1], [0], [1]]


def test_batches_hold_messages_of_one_topic_only() -> None:
    batches = Batches()
    one = handler(batches, batch=3)
    queues, _ = queues_of([row(b"a", 0), row(b"a", 1, "payments")], {"orders": one, "payments": one})

    runners.run(queues, lambda: 0.0, lambda _: None)

    assert batches.calls == [[0], [1]]


def test_a_handler_that_puts_its_completion_off_fails_the_task() -> None:
    queues, _ = queues_of([row(b"a", 0)], {"orders": handler(lambda _: DeferredCompletion(), on_failure="drop")})

    with pytest.raises(SinkError, match="returned a DeferredCompletion, which cannot be put off on an executor"):
        runners.run(queues, lambda: 0.0, lambda _: None)


def test_a_dead_letter_that_cannot_be_written_fails_the_task() -> None:
    def refuse(*_: object) -> None:
        raise PenstockError("no broker")

    queues, _ = queues_of(
        [row(b"a", 0)], {"orders": handler(Bench({0: 1}), on_failure="dead_letter", retry_policy=retry(1))}, refuse
    )

    with pytest.raises(PenstockError, match="no broker"):
        runners.run(queues, lambda: 0.0, lambda _: None)


def test_a_filter_that_fails_on_a_message_lets_those_of_its_key_in_the_batch_go_first() -> None:
    batches = Batches()
    asked: list[int] = []

    def wanted(message: Message) -> bool:
        asked.append(message.offset)
        if message.offset == 1 and asked.count(1) < 3:
            raise RuntimeError("not ready")
        return True

    queues = run_batches(batches, [row(b"a", 0), row(b"a", 1), row(b"a", 2)], filter=wanted)

    assert batches.calls == [[0], [1], [2]]
    assert queues.counts.handled == 3


def test_a_message_tells_how_often_its_task_tried_it_before() -> None:
    bench, seen = Bench(), list[tuple[int, int]]()

    def handle(message: Message) -> None:
        seen.append((message.offset, message.attempt))
        if message.offset == 0 and message.attempt < 2:
            raise RuntimeError("not yet")

    queues, _ = queues_of([row(b"a", 0), row(b"a", 1)], {"orders": handler(handle, retry_policy=waits())})
    runners.run(queues, bench.time, bench.sleep)

    assert seen == [(0, 0), (0, 1), (0, 2), (1, 0)]
