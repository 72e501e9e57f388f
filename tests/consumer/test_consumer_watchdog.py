"""What a consumer says of itself: stuck handlers with their stacks, why a partition stands, counts that add up."""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
from collections.abc import Callable

import pytest
import tenacity

from kafka_tools import produce
from penstock.consumer import (
    ConsumerSettings,
    ConsumerStatistics,
    DeferredCompletion,
    Explanation,
    LitePushConsumer,
    handler,
    retry,
)
from penstock.devbroker import DevBroker
from penstock.message import Message
from waiting import wait_until

NewTopic = Callable[..., str]


class PoisonError(Exception):
    """What the poison message raises."""


def consumer_of(
    broker: DevBroker,
    topic: str,
    function: Callable[[Message], object],
    settings: dict[str, object] | None = None,
    **options: object,
) -> LitePushConsumer:
    return LitePushConsumer(
        f"g-{topic}",
        {topic: handler(function, **options)},  # type: ignore[arg-type] # options of several types
        bootstrap_servers=broker.bootstrap_servers,
        settings=ConsumerSettings(**{"workers": 4, "commit_interval": 0.1, **(settings or {})}),
    )


def test_a_handler_that_is_stuck_is_named_with_its_stack_and_what_it_holds(
    broker: DevBroker, new_topic: NewTopic, caplog: pytest.LogCaptureFixture
) -> None:
    topic = new_topic()
    produce(broker.bootstrap_servers, topic, [(b"secret-key", b"secret-value"), (b"secret-key", b"secret-value")])
    release = threading.Event()

    def waits_for_what_never_comes() -> None:
        release.wait(120)

    def function(_message: Message) -> None:
        waits_for_what_never_comes()

    with caplog.at_level(logging.WARNING, "penstock"):
        with consumer_of(broker, topic, function, {"stall_after": 0.3}) as consumer:
            wait_until(lambda: consumer.statistics().stalls >= 2)
            release.set()
        said = [one.getMessage() for one in caplog.records if "has been in" in one.getMessage()]

    assert f"{topic}[0]@0 has been in" in said[0]
    assert f"the watermark of {topic}[0] is 0, held by this message" in said[0]
    assert "in waits_for_what_never_comes" in said[0]
    assert "penstock-worker-" in said[0]
    # Told again only when the time had doubled, and never with what the message holds.
    assert len(said) < 8
    assert "secret" not in caplog.text


def test_a_handler_that_waits_on_the_loop_shows_where_it_waits(
    broker: DevBroker, new_topic: NewTopic, caplog: pytest.LogCaptureFixture
) -> None:
    topic = new_topic()
    produce(broker.bootstrap_servers, topic, [(b"k", b"x")])
    stop = threading.Event()

    async def innermost() -> None:
        await asyncio.to_thread(stop.wait, 120)

    async def function(_message: Message) -> None:
        await innermost()

    # Longer than a busy machine keeps a whole process from running.
    stalls = {"stall_after": 3.0}
    with caplog.at_level(logging.WARNING, "penstock"), consumer_of(broker, topic, function, stalls) as consumer:
        wait_until(lambda: consumer.statistics().stalls >= 1)
        (said,) = consumer.explain()
        stop.set()

    assert "in innermost" in caplog.text
    assert "in function" in caplog.text
    assert "the event loop has been blocked" not in caplog.text
    assert (said.state, said.key) == ("in handler", b"k")
    assert said.worker is not None
    assert said.worker.startswith("penstock-task-")


def test_a_handler_that_blocks_the_loop_is_reported_with_the_loops_stack(
    broker: DevBroker, new_topic: NewTopic, caplog: pytest.LogCaptureFixture
) -> None:
    topic = new_topic()
    produce(broker.bootstrap_servers, topic, [(b"k", b"x")])
    release = threading.Event()

    def blocks() -> None:
        release.wait(120)

    async def function(_message: Message) -> None:
        blocks()

    with caplog.at_level(logging.WARNING, "penstock"), consumer_of(broker, topic, function, {"stall_after": 0.3}):
        wait_until(lambda: "the event loop has been blocked" in caplog.text)
        release.set()

    report = next(text for one in caplog.records if "event loop" in (text := one.getMessage()))
    assert "in blocks" in report


@pytest.mark.parametrize("batch", [1, 5])
@pytest.mark.parametrize("option", ["filter", "decoder"])
def test_what_is_asked_before_the_handler_and_never_answers_is_named_like_a_handler(
    option: str, batch: int, broker: DevBroker, new_topic: NewTopic, caplog: pytest.LogCaptureFixture
) -> None:
    topic = new_topic()
    produce(broker.bootstrap_servers, topic, [(b"k", b"passes"), (b"k", b"hangs")])
    release = threading.Event()

    def waits_for_what_never_comes(given: Message | bytes) -> bool:
        if (given.value if isinstance(given, Message) else given) == b"hangs":
            release.wait(120)
        return True

    def function(_message: object) -> None:
        """Everything passes."""

    asked: dict[str, object] = {option: waits_for_what_never_comes}
    if batch > 1:
        asked["batch"] = batch
    stalls = {"stall_after": 0.3}
    with (
        caplog.at_level(logging.WARNING, "penstock"),
        consumer_of(broker, topic, function, stalls, **asked) as consumer,
    ):
        wait_until(lambda: consumer.statistics().stalls >= 1)
        said = explained(consumer)
        release.set()

    assert said is not None
    # Of a batch nothing is done before it was handed over.
    assert said.blocking_offset == (1 if batch == 1 else 0)
    assert said.state == "in handler" or batch > 1
    assert f"{topic}[0]@1 has been in" in caplog.text
    assert "in waits_for_what_never_comes" in caplog.text


def explained(consumer: LitePushConsumer) -> Explanation | None:
    found = consumer.explain()
    return found[0] if found and found[0].partition >= 0 else None


def test_every_state_of_the_message_that_holds_the_watermark_is_told(broker: DevBroker, new_topic: NewTopic) -> None:
    topic = new_topic()
    gates = {name: threading.Event() for name in (b"handler", b"first")}
    completion = DeferredCompletion()
    mended = threading.Event()

    def function(message: Message) -> DeferredCompletion | None:
        if message.value in gates:
            gates[message.value].wait(120)
        if message.value == b"deferred":
            return completion
        if message.value == b"poison" and not mended.is_set():
            raise PoisonError
        return None

    policy = retry(attempts=100, wait=tenacity.wait_fixed(0.5))
    with consumer_of(broker, topic, function, {"workers": 1}, retry_policy=policy) as consumer:
        idle = wait_until(lambda: explained(consumer))
        produce(broker.bootstrap_servers, topic, [(b"a", b"handler")])
        running = wait_until(lambda: (one := explained(consumer)) and one.state == "in handler" and one)
        produce(broker.bootstrap_servers, topic, [(b"b", b"poison"), (b"b", b"behind")])
        wait_until(lambda: consumer.statistics().in_flight == 3)
        # The only worker is busy: what comes behind it is queued once the first is done and the next begins.
        gates[b"handler"].set()
        parked = wait_until(lambda: (one := explained(consumer)) and one.state == "parked" and one.attempt and one)
        mended.set()
        wait_until(lambda: consumer.statistics().in_flight == 0)
        produce(broker.bootstrap_servers, topic, [(b"c", b"deferred"), (b"d", b"above")])
        put_off = wait_until(
            lambda: (one := explained(consumer)) and one.state == "put off" and one.in_flight == 1 and one.gaps and one
        )
        completion.complete()
        wait_until(lambda: consumer.statistics().in_flight == 0)
        consumer.change_handler(topic, rate=0)
        produce(broker.bootstrap_servers, topic, [(b"e", b"held")])
        held = wait_until(lambda: (one := explained(consumer)) and one.state == "held by rate" and one)
        told = wait_until(lambda: (one := explained(consumer)) and one.lag == 1 and one)
        consumer.change_handler(topic, rate=None)

    assert (idle.state, idle.blocking_offset, idle.in_flight) == ("position not known yet", None, 0)
    assert (running.key, running.blocking_offset) == (b"a", 0)
    assert running.age is not None
    assert (parked.key, parked.blocking_offset, parked.parked) == (b"b", 1, 2)
    assert parked.due_in is not None
    assert parked.due_in <= 0.5
    assert (put_off.key, put_off.blocking_offset, put_off.due_in, put_off.gaps) == (b"c", 3, None, 1)
    assert (held.blocking_offset, held.worker, held.rate, told.watermark) == (5, None, 0, 5)
    assert f"1 in flight ({held.bytes_in_flight} bytes), " in str(held)
    assert f"held by offset 5, held by rate 0/s ({held.handler})" in str(held)
    assert f"held by offset 1, parked ({parked.handler}) for" in str(parked)
    assert (parked.rate, running.rate) == (None, None)


def test_a_message_that_waits_for_a_worker_is_queued(broker: DevBroker, new_topic: NewTopic) -> None:
    topic, gate = new_topic(partitions=2), threading.Event()

    def function(message: Message) -> None:
        gate.wait(120)

    with consumer_of(broker, topic, function, {"workers": 1}) as consumer:
        produce(broker.bootstrap_servers, topic, [(b"a", b"x")], partition=0)
        wait_until(lambda: consumer.statistics().busy_workers)
        produce(broker.bootstrap_servers, topic, [(b"b", b"x")], partition=1)
        said = wait_until(lambda: [one for one in consumer.explain() if one.state == "queued"])
        gate.set()

    assert [(one.partition, one.blocking_offset, one.rate, one.worker) for one in said] == [(1, 0, None, None)]
    assert f"held by offset 0, queued ({said[0].handler})" in str(said[0])


def unaccounted(now: ConsumerStatistics) -> int:
    """Return by how much the counts miss each other."""
    ended = now.restored + now.handled + now.filtered + now.dropped + now.dead_letters + now.retry_topic
    return now.received - ended - now.in_flight


@pytest.mark.parametrize("fate", ["drop", "dead_letter"])
def test_the_counts_add_up_whenever_nothing_moves(broker: DevBroker, new_topic: NewTopic, fate: str) -> None:
    topic, count = new_topic(partitions=2), 400
    kinds = [b"fine", b"poison", b"refused", b"fine", b"later"]
    produce(broker.bootstrap_servers, topic, ((b"k%d" % (i % 50), kinds[i % 5]) for i in range(count)))
    open_gate, most_off = threading.Event(), 0
    put_off: list[DeferredCompletion] = []

    def function(message: Message) -> DeferredCompletion | None:
        if message.value == b"poison":
            raise PoisonError
        if message.value == b"later":
            put_off.append(completion := DeferredCompletion())
            return completion
        if message.offset % 17 == 3:
            open_gate.wait(120)
        return None

    options: dict[str, object] = {
        "on_failure": fate,
        "retry_policy": retry(attempts=2, wait=tenacity.wait_fixed(0.02)),
        "filter": lambda message: message.value != b"refused",
        "retry_delays": (0.05,),
    }
    with consumer_of(broker, topic, function, **options) as consumer:
        # All workers wait, or nothing is left that can move: a moment without motion is sure to come.
        wait_until(lambda: consumer.statistics().busy_workers == 4)
        wait_until(lambda: unaccounted(consumer.statistics()) == 0)
        for _ in range(50):
            most_off = max(most_off, abs(unaccounted(consumer.statistics())))
        open_gate.set()

        def all_is_done() -> bool:
            for one in put_off[:]:
                one.complete()
            now = consumer.statistics()
            # Eighty poisoned ones come a second time, by the retry topic.
            return now.received == count + 80 and now.in_flight == 0 and unaccounted(now) == 0

        wait_until(all_is_done)
        end = consumer.statistics()

    # A handler's count follows its message by a moment, at most one for each place where handlers are called.
    assert most_off <= 4 + len(put_off)
    assert (end.filtered, end.retry_topic, end.handled) == (80, 80, 240)
    assert (end.dropped, end.dead_letters) == ((80, 0) if fate == "drop" else (0, 80))
    assert end.failed == 320
    assert sum(one.parked for one in end.partitions) == 0


def leave_by_exit(_message: Message) -> None:
    sys.exit(3)


def leave_by_thread(_message: Message) -> None:
    import _thread

    _thread.exit()


def end_generators(_message: Message) -> None:
    raise StopIteration


def close_generators(_message: Message) -> None:
    raise GeneratorExit


@pytest.mark.parametrize("function", [leave_by_exit, leave_by_thread, end_generators, close_generators])
@pytest.mark.parametrize("kind", ["thread", "task"])
def test_a_handler_that_tries_to_end_its_thread_fails_its_message_only(
    broker: DevBroker, new_topic: NewTopic, function: Callable[[Message], None], kind: str
) -> None:
    topic = new_topic()
    garbage = [(b"\xff\xfe", b"\x00" * 10), (b"", None), (None, b""), (b"\x00", b"\xc3\x28"), (b"k" * 40_000, b"v")]
    produce(broker.bootstrap_servers, topic, garbage)

    async def task(message: Message) -> None:
        await asyncio.sleep(0)
        function(message)

    given = function if kind == "thread" else task
    with consumer_of(broker, topic, given, retry_policy=retry(attempts=1), on_failure="drop") as consumer:
        wait_until(lambda: consumer.statistics().dropped == 5)
        names = {one.name for one in threading.enumerate()}
        statistics = consumer.statistics()

    assert statistics.partitions[0].watermark == 5
    if kind == "thread":
        assert sum(name.startswith(f"penstock-worker-g-{topic}-") for name in names) == 4
