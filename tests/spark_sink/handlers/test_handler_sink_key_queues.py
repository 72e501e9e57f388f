"""What becomes of a task's messages: retries, their bounds, filters, decoders and batches, on a test's clock."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from key_queue_rows import Letters, queues_of, row, waits

from penstock.consumer import DeferredCompletion, handler
from penstock.consumer.handlers.route import Failed
from penstock.errors import BatchError, RetryLater, SinkError
from penstock.message import Message, Record
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


def test_of_a_batch_that_failed_in_part_only_those_and_what_is_behind_them_come_again() -> None:
    batches = Batches(BatchError({0: RuntimeError("no")}))

    queues = run_batches(batches, [row(b"a", 0), row(b"b", 1), row(b"a", 2)])

    # The head alone, then what was behind it.
    assert batches.calls == [[0, 1, 2], [0], [2]]
    assert queues.counts.handled == 3


def test_a_handler_that_puts_its_completion_off_fails_the_task() -> None:
    queues, _ = queues_of([row(b"a", 0)], {"orders": handler(lambda _: DeferredCompletion(), on_failure="drop")})

    with pytest.raises(SinkError, match="returned a DeferredCompletion, which cannot be put off on an executor"):
        runners.run(queues, lambda: 0.0, lambda _: None)
