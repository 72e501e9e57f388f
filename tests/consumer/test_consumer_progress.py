"""What is done of a run whose handler does not come back: it is told, and it is committed."""

from __future__ import annotations

import pytest
from stepped import Stepped

from penstock.consumer import handler
from penstock.errors import BatchError
from penstock.message import Message


def nothing(_message: Message) -> None:
    """Be done at once."""


def stuck_at_3(**settings: object) -> Stepped:
    """Return a consumer of five messages of one key whose handler is at offset 3."""
    stepped = Stepped({"t": handler(nothing)}, **settings)
    stepped.feed("t", [(b"k", b"%d" % i) for i in range(5)])
    worker = stepped.take()
    for _ in range(3):
        stepped.finish(worker)
    stepped.broker.advance(7)
    return stepped


def test_the_message_in_the_handler_is_named_and_not_its_finished_predecessors() -> None:
    stepped = stuck_at_3()

    (found,) = stepped.consumer.explain()
    counts = stepped.consumer.statistics()

    assert (found.blocking_offset, found.state, found.key) == (3, "in handler", b"k")
    assert found.worker == stepped.consumer.workers[0].slot.name
    assert found.age == pytest.approx(7)
    assert (found.watermark, found.in_flight, counts.handled, counts.in_flight) == (3, 2, 3, 2)


def test_work_finished_before_a_handler_that_hangs_is_in_the_next_commit_and_counted_once() -> None:
    stepped = stuck_at_3(commit_interval=1.0)

    stepped.poll(2)
    while_stuck = stepped.committed("t")
    stepped.serve()
    stepped.broker.advance(2)
    stepped.poll(2)
    counts = stepped.consumer.statistics()

    assert while_stuck == 3
    assert stepped.committed("t") == 5
    assert (counts.handled, counts.in_flight) == (5, 0)


def test_a_revocation_that_overruns_commits_what_its_handlers_finished() -> None:
    stepped = stuck_at_3(commit_interval=3600.0, revoke_timeout=1.0)

    # Leaving revokes, and waits for the handler as long as it may.
    stepped.loop.leave()

    assert stepped.committed("t") == 3


def test_a_message_that_failed_before_a_handler_that_hangs_is_not_taken_for_done() -> None:
    stepped = Stepped({"t": handler(nothing)}, lanes_per_worker=1)
    stepped.feed("t", [(b"a", b"0"), (b"b", b"1"), (b"c", b"2"), (b"a", b"3"), (b"c", b"4")])
    worker = stepped.take()

    stepped.finish(worker)
    stepped.finish(worker, ValueError())
    stepped.finish(worker)
    stepped.finish(worker)
    (found,) = stepped.consumer.explain()
    stepped.broker.advance(1)
    stepped.poll(2)
    committed = stepped.committed("t")

    assert (found.blocking_offset, found.state, found.key, found.in_flight) == (1, "parked", b"b", 2)
    assert committed == 1
    assert stepped.consumer.statistics().handled == 3


def test_a_batch_in_the_handler_is_done_as_a_whole_or_not_at_all() -> None:
    stepped = Stepped({"t": handler(nothing, batch=2)})
    stepped.feed("t", [(b"k", b"%d" % i) for i in range(6)])
    worker = stepped.take()

    stepped.finish(worker)
    (second,) = stepped.consumer.explain()
    stepped.finish(worker, BatchError({1: ValueError()}))
    (third,) = stepped.consumer.explain()

    assert (second.blocking_offset, second.state, second.in_flight) == (2, "in handler", 4)
    assert (third.blocking_offset, third.state) == (3, "parked")
