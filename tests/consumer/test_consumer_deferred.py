"""Completions that handlers put off, on a real broker: the key waits, the offset is held, stop and revocation."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import tenacity
from consuming import consumer_of

from kafka_tools import committed, produce, read_all
from penstock.consumer import DeferredCompletion, handler, retry
from penstock.devbroker import DevBroker
from penstock.message import Message
from waiting import wait_until

NewTopic = Callable[..., str]


class Puts:
    """A handler that puts off what has the key `late` and keeps the completions; everything else is done at once."""

    def __init__(self) -> None:
        self.calls: list[bytes | None] = []
        self.out: dict[bytes | None, DeferredCompletion] = {}

    def __call__(self, message: Message) -> DeferredCompletion | None:
        """Put it off, or not."""
        self.calls.append(message.value)
        if message.key != b"late":
            return None
        # Noted before it is returned: another thread may complete it before the consumer has it.
        return self.out.setdefault(message.value, DeferredCompletion())


def from_another_thread(completion: DeferredCompletion, error: BaseException | None = None) -> bool:
    answers: list[bool] = []
    call = completion.complete if error is None else lambda: completion.fail(error)
    thread = threading.Thread(target=lambda: answers.append(call()))
    thread.start()
    thread.join()
    return answers[0]


def test_a_completion_of_another_thread_lets_its_key_and_the_commit_go_on(
    broker: DevBroker, new_topic: NewTopic
) -> None:
    topic, group = new_topic(), ""
    records = [(b"late", b"1"), (b"late", b"2"), *((b"k%d" % i, b"x") for i in range(100))]
    produce(broker.bootstrap_servers, topic, records)
    puts = Puts()
    group = f"group-{topic}"

    with consumer_of(broker, {topic: handler(puts)}) as consumer:
        held = wait_until(lambda: (now := consumer.statistics()).handled == 100 and now.deferred == 1 and now)
        wait_until(lambda: committed(broker.bootstrap_servers, group, topic, 1)[0].metadata)
        held_offset = committed(broker.bootstrap_servers, group, topic, 1)[0].offset
        calls_while_held = list(puts.calls)
        from_another_thread(puts.out[b"1"])
        wait_until(lambda: b"2" in puts.out)
        from_another_thread(puts.out[b"2"])
        wait_until(lambda: committed(broker.bootstrap_servers, group, topic, 1)[0].offset == 102)

    assert b"2" not in calls_while_held
    assert (held.deferred, held.parked_keys, held_offset) == (1, 1, 0)
    assert consumer.statistics().handled == 102
    assert consumer.statistics().deferred == 0


def test_a_thousand_completions_that_race_with_their_handlers_are_all_done_in_order(
    broker: DevBroker, new_topic: NewTopic
) -> None:
    topic = new_topic()
    produce(broker.bootstrap_servers, topic, ((b"k%d" % (i % 10), b"%d" % i) for i in range(1000)))
    order: dict[bytes | None, list[int]] = {}
    threads: list[threading.Thread] = []

    def races(message: Message) -> DeferredCompletion:
        order.setdefault(message.key, []).append(message.offset)
        completion = DeferredCompletion()
        thread = threading.Thread(target=completion.complete)
        threads.append(thread)
        thread.start()
        return completion

    with consumer_of(broker, {topic: handler(races)}) as consumer:
        statistics = wait_until(
            lambda: (now := consumer.statistics()).handled == 1000 and not now.in_flight and not now.parked_keys and now
        )
    for thread in threads:
        thread.join()

    assert all(offsets == sorted(offsets) for offsets in order.values())
    assert sum(map(len, order.values())) == 1000
    assert (statistics.in_flight, statistics.deferred, statistics.parked_keys) == (0, 0, 0)


def test_a_completion_that_fails_is_tried_again_and_then_given_up(broker: DevBroker, new_topic: NewTopic) -> None:
    topic = new_topic()
    produce(broker.bootstrap_servers, topic, [(b"k", b"poison"), (b"k", b"after")])
    calls: list[bytes | None] = []

    def fails_later(message: Message) -> DeferredCompletion:
        calls.append(message.value)
        completion = DeferredCompletion()
        error = ValueError("later") if message.value == b"poison" else None
        threading.Thread(target=from_another_thread, args=(completion, error)).start()
        return completion

    policy = retry(attempts=3, wait=tenacity.wait_fixed(0.02))
    with consumer_of(broker, {topic: handler(fails_later, retry_policy=policy, on_failure="dead_letter")}) as consumer:
        wait_until(lambda: consumer.statistics().handled == 1)
        statistics = consumer.statistics()

    (letter,) = read_all(broker.bootstrap_servers, f"dlq.{topic}")
    headers = dict(letter.headers() or [])
    assert calls == [b"poison"] * 3 + [b"after"]
    assert (statistics.failed, statistics.dead_letters) == (3, 1)
    assert headers["__dlq.errors.delivery.count"] == b"3"
    assert headers["__dlq.errors.message"] == b"later"


def test_an_async_handler_may_put_its_completion_off_and_time_ends_one_that_does_not_come(
    broker: DevBroker, new_topic: NewTopic
) -> None:
    topic = new_topic()
    produce(broker.bootstrap_servers, topic, [(b"late", b"comes"), (b"late", b"never"), (b"late", b"last")])
    puts = Puts()

    async def later(message: Message) -> DeferredCompletion | None:
        return puts(message)

    one = handler(later, deferred_timeout=0.5, retry_policy=retry(attempts=1), on_failure="dead_letter")
    with consumer_of(broker, {topic: one}) as consumer:
        wait_until(lambda: b"comes" in puts.out)
        in_time = from_another_thread(puts.out[b"comes"])
        wait_until(lambda: b"last" in puts.out)
        too_late = from_another_thread(puts.out[b"never"])
        from_another_thread(puts.out[b"last"])
        wait_until(lambda: consumer.statistics().in_flight == 0)

    letters = read_all(broker.bootstrap_servers, f"dlq.{topic}")
    assert too_late is False
    # A machine that stands still for half a second makes more of them late, and none is lost.
    assert puts.calls == [b"comes", b"never", b"last"]
    assert in_time is (b"comes" not in [letter.value() for letter in letters])
    (never,) = [letter for letter in letters if letter.value() == b"never"]
    assert dict(never.headers() or [])["penstock-exception-class"] == b"builtins.TimeoutError"


def test_a_drain_waits_for_completions_and_for_what_waits_behind_them(broker: DevBroker, new_topic: NewTopic) -> None:
    topic = new_topic()
    produce(broker.bootstrap_servers, topic, [(b"late", b"1"), (b"late", b"2"), (b"late", b"3")])
    puts = Puts()
    consumer = consumer_of(broker, {topic: handler(puts)}, stop_timeout=60).start()
    wait_until(lambda: consumer.statistics().received == 3 and b"1" in puts.out)
    stopped: list[bool] = []
    stopping = threading.Thread(target=lambda: stopped.append(consumer.stop()))

    stopping.start()
    wait_until(lambda: "stopping" in {one.paused for one in consumer.statistics().partitions})
    for value in (b"1", b"2", b"3"):
        wait_until(lambda value=value: value in puts.out)
        from_another_thread(puts.out[value])
    stopping.join(60)

    assert stopped == [True]
    assert committed(broker.bootstrap_servers, f"group-{topic}", topic, 1)[0].offset == 3


def test_a_restart_hands_a_message_over_again_whose_completion_was_out(broker: DevBroker, new_topic: NewTopic) -> None:
    topic = new_topic()
    produce(broker.bootstrap_servers, topic, [(b"late", b"1"), (b"other", b"2")])
    first, second = Puts(), Puts()

    consumer = consumer_of(broker, {topic: handler(first)}, revoke_timeout=0.2).start()
    wait_until(lambda: consumer.statistics().handled == 1 and b"1" in first.out)
    drained = consumer.stop(timeout=0.2)
    between = committed(broker.bootstrap_servers, f"group-{topic}", topic, 1)[0].offset
    # Too late: what it says of a consumer that has ended moves nothing.
    from_another_thread(first.out[b"1"])
    with consumer_of(broker, {topic: handler(second)}):
        wait_until(lambda: b"1" in second.out)
        from_another_thread(second.out[b"1"])
        wait_until(lambda: committed(broker.bootstrap_servers, f"group-{topic}", topic, 1)[0].offset == 2)

    assert drained is False
    assert between == 0
    assert second.calls == [b"1"]


@pytest.mark.parametrize("in_time", [True, False])
def test_a_revocation_waits_for_completions_no_longer_than_its_budget(
    broker: DevBroker, new_topic: NewTopic, *, in_time: bool
) -> None:
    topic = new_topic(partitions=2)
    for partition in (0, 1):
        produce(broker.bootstrap_servers, topic, [(b"late", b"%d" % partition)], partition=partition)
    first, second = Puts(), Puts()
    options = {"revoke_timeout": 30 if in_time else 0.3, "stop_timeout": 0, "config": {"heartbeat.interval.ms": 200}}
    # A key for each partition, or the second would wait for the first.
    by_partition = {"key": lambda message: b"%d" % message.partition}

    with consumer_of(broker, {topic: handler(first, **by_partition)}, **options) as one:
        wait_until(lambda: len(first.out) == 2)
        with consumer_of(broker, {topic: handler(second, **by_partition)}, **options) as other:
            # Its partition is not handed out any more, though it has not been given back yet.
            wait_until(
                lambda: any(not fetch.assignment.active for fetch in dict(one._engine.processor.deferred).values())
            )
            if in_time:
                for completion in first.out.values():
                    from_another_thread(completion)
            wait_until(lambda: len(other.statistics().partitions) == 1)
            if not in_time:
                wait_until(lambda: second.calls)
            handed_over = list(second.calls)
            late = [completion.complete() for completion in first.out.values()]
            wait_until(lambda: one.statistics().in_flight == 0)
            failed = one.statistics().failed
            for completion in second.out.values():
                completion.complete()

    # Done in time it was committed in the callback; too late it was handled again, and the late word cost nothing.
    assert len(handed_over) == (0 if in_time else 1)
    assert late == [not in_time] * 2
    assert failed == 0
