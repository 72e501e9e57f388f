"""How long who sends is kept waiting: by a store that does not answer, and by a producer that is stopped."""

from __future__ import annotations

import asyncio
import logging
import re
import threading
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple, NoReturn

import pytest

from penstock.errors import (
    BrokerConnectionError,
    BufferFullError,
    DecisionNotStoredError,
    HalfNotStoredError,
    PublicationNotSeenError,
    TransactionError,
)
from penstock.transactions import Transaction, TransactionalProducer
from penstock.transactions.store import DecidedCallback, Prepared, PreparedCallback, SettledCallback
from penstock.transactions.wire.half import CheckRequest, Half
from penstock.transactions.wire.ops import Author, Verdict
from waiting import wait_until


class Kept(NamedTuple):
    halves: Sequence[Half]


class MuteStore:
    """A store that answers when the test says so, also after it was stopped."""

    def __init__(self) -> None:
        self.prepares: list[tuple[Prepared, PreparedCallback]] = []
        self.decides: list[tuple[Verdict, DecidedCallback]] = []
        self.watched: set[str] = set()

    def start(self) -> None: ...

    def stop(self, timeout_s: float) -> None: ...

    def require_target(self, topic: str, partition: int | None) -> None: ...

    def prepare(self, halves: Sequence[Half], callback: PreparedCallback, ordering_key: bytes | None = None) -> None:  # noqa: ARG002 - a mute store has no use for it
        self.prepares.append((Kept(halves), callback))

    def say_prepared(self, number: int) -> None:
        prepared, callback = self.prepares[number]
        callback(prepared)

    def decide(self, prepared: Prepared, verdict: Verdict, callback: DecidedCallback) -> None:  # noqa: ARG002 - the same
        self.decides.append((verdict, callback))

    def answer(self, request: CheckRequest, verdict: Verdict, author: Author) -> NoReturn:
        raise NotImplementedError

    def checks(self, group: str) -> NoReturn:
        raise NotImplementedError

    def watch(self, transaction_id: str, callback: SettledCallback) -> None:  # noqa: ARG002 - the same
        self.watched.add(transaction_id)

    def forget(self, transaction_id: str) -> None:
        self.watched.discard(transaction_id)

    def cancel(self, transaction_id: str, group: str, wait_s: float) -> NoReturn:
        raise NotImplementedError


@pytest.fixture
def store() -> MuteStore:
    return MuteStore()


def test_a_half_that_is_not_answered_at_the_stop_is_reported_as_not_stored_and_rolled_back_if_it_was(
    store: MuteStore,
) -> None:
    producer = TransactionalProducer("orders", store=store).start()
    sent = producer.submit("t", value=b"v")

    producer.stop(0.1)
    with pytest.raises(HalfNotStoredError, match="stopped before the store had answered"):
        sent.result(0)
    assert producer.statistics().in_flight == 1
    store.say_prepared(0)
    ((verdict, callback),) = store.decides
    callback(None)

    assert verdict is Verdict.ROLLBACK
    statistics = producer.statistics()
    assert (statistics.in_flight, statistics.failed, statistics.committed) == (0, 1, 0)


def test_a_decision_that_is_not_answered_at_the_stop_is_reported_as_not_stored_once(store: MuteStore) -> None:
    producer = TransactionalProducer("orders", store=store).start()
    sent = producer.submit("t", value=b"v", wait="published")
    store.say_prepared(0)
    results: list[object] = []
    sent.add_done_callback(results.append)

    producer.stop(0.1)
    with pytest.raises(DecisionNotStoredError, match="its COMMIT is not known to be stored"):
        sent.result(0)
    ((_, answer),) = store.decides
    answer(None)

    assert (results, store.watched) == ([sent], set())
    statistics = producer.statistics()
    assert (statistics.in_flight, statistics.failed, statistics.committed) == (0, 1, 0)


def test_the_time_for_a_publication_begins_with_the_stored_decision(store: MuteStore) -> None:
    producer = TransactionalProducer("orders", store=store, wait="published", publish_timeout=0.05).start()
    errors: list[Exception] = []

    def send() -> None:
        try:
            producer.send("t", value=b"half not stored")
        except HalfNotStoredError as error:
            errors.append(error)

    sending = threading.Thread(target=send, daemon=True)
    sending.start()
    wait_until(lambda: len(store.prepares) == 1)
    # One that was begun later, and is decided.
    decided = producer.submit("t", value=b"decided")
    store.say_prepared(1)
    ((_, answer),) = store.decides
    answer(None)
    with pytest.raises(
        PublicationNotSeenError, match=r"is committed, but was not seen to be visible within .*`penstock tx show "
    ):
        decided.result(30)
    waits_on = sending.is_alive()
    store.prepares[0][1](HalfNotStoredError("the broker is away"))
    sending.join(30)

    assert waits_on
    assert [str(one) for one in errors] == ["the broker is away"]
    assert store.watched == set()
    producer.stop()


def test_a_waiter_for_a_delayed_message_is_notified_when_it_is_due(store: MuteStore) -> None:
    producer = TransactionalProducer("orders", store=store, wait="published", publish_timeout=0.05).start()

    due = int(time.time()) + 3600
    sent = producer.submit("t", value=b"v", deliver_at=due)
    store.say_prepared(0)
    store.decides[0][1](None)

    at = datetime.fromtimestamp(due, UTC).isoformat(timespec="milliseconds")
    with pytest.raises(PublicationNotSeenError, match=re.escape(f"it will be published when it is due, at {at}")):
        sent.result(30)
    producer.stop()


def test_a_lost_decision_of_a_producer_without_a_check_is_reported_with_who_can_settle_it(store: MuteStore) -> None:
    producer = TransactionalProducer("orders", store=store).start()

    sent = producer.submit("t", value=b"v")
    store.say_prepared(0)
    store.decides[0][1](DecisionNotStoredError("its COMMIT is lost"))

    with pytest.raises(DecisionNotStoredError, match=r"^its COMMIT is lost; this producer has no check: .*penstock tx"):
        sent.result(0)
    producer.stop()


def test_who_waits_for_the_handing_over_alone_goes_on_and_a_lost_decision_is_counted(store: MuteStore) -> None:
    producer = TransactionalProducer("orders", store=store, wait="sent").start()

    for number, lost in enumerate((None, DecisionNotStoredError("its COMMIT is lost"))):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(store, "prepare", lambda halves, callback, _: callback(Kept(halves)))
            with producer.transaction("t", value=b"v"):
                pass
        assert producer.statistics().in_flight == 1
        store.decides[number][1](lost)

    statistics = producer.statistics()
    assert (statistics.in_flight, statistics.committed, statistics.lost_decisions) == (0, 1, 1)
    producer.stop()


def test_a_log_handler_that_stops_the_producer_leaves_no_thread_waiting(store: MuteStore) -> None:
    producer = TransactionalProducer("orders", store=store).start()
    unseen = producer.submit("t", value=b"v", wait="published")
    store.say_prepared(0)
    store.decides[0][1](None)
    handler = logging.Handler()
    handler.emit = lambda _: producer.stop(0)  # type: ignore[method-assign] # on the deadline thread
    logging.getLogger("penstock.transactions").addHandler(handler)

    try:
        producer.submit("t", value=b"lost", wait="sent")
        # Not before: a half that is not answered in time logs nothing.
        producer._core.answer_timeout_s = 0.05
        store.say_prepared(1)

        with pytest.raises(PublicationNotSeenError, match="the producer was stopped"):
            unseen.result(10)
    finally:
        logging.getLogger("penstock.transactions").removeHandler(handler)


def test_a_time_limit_that_has_passed_waits_for_nothing(store: MuteStore) -> None:
    producer = TransactionalProducer("orders", store=store).start()
    submission = producer.submit("t", value=b"v")

    with pytest.raises(TimeoutError):
        submission.result(-1)
    producer.stop(-0.5)

    assert isinstance(submission.exception(), HalfNotStoredError)


def test_the_bytes_in_flight_are_bounded_and_one_alone_may_have_more(store: MuteStore) -> None:
    limits: Any = {"max_in_flight": 10, "max_in_flight_bytes": 100, "when_full": "raise"}
    producer = TransactionalProducer("orders", store=store, **limits).start()

    producer.submit("t", value=bytes(500))
    with pytest.raises(BufferFullError, match="500 bytes"):
        producer.submit("t", value=b"v")
    store.prepares[0][1](HalfNotStoredError("the broker is away"))
    producer.submit("t", value=bytes(50), key=bytes(10))
    with pytest.raises(BufferFullError, match="max_in_flight_bytes 100"):
        producer.submit("t", value=bytes(41))
    producer.submit("t", value=bytes(40))

    assert (producer._core.count, producer._core.bytes) == (2, 100)
    producer.stop(0)


def test_room_that_never_comes_is_reported_after_the_time_to_wait(store: MuteStore) -> None:
    producer = TransactionalProducer("orders", store=store, max_in_flight=1, send_timeout=0.05).start()
    producer.submit("t", value=b"v")

    with pytest.raises(BufferFullError, match="1 transactions"):
        producer.submit("t", value=b"v")

    store.prepares[0][1](HalfNotStoredError("the broker is away"))
    producer.submit("t", value=b"v")
    producer.stop(0)


def test_an_async_block_that_is_cancelled_while_it_starts_is_rolled_back_and_leaves_its_place(store: MuteStore) -> None:
    entered, let_go = threading.Event(), threading.Event()

    def watch_late(transaction_id: str, _: SettledCallback) -> None:
        entered.set()
        let_go.wait(60)
        store.watched.add(transaction_id)

    store.watch = watch_late  # type: ignore[method-assign] # slow, as one that asks brokers first
    producer = TransactionalProducer("orders", store=store, wait="published").start()

    async def enter() -> None:
        async with producer.transaction("t", value=b"v"):
            raise AssertionError("it was cancelled before")

    async def main() -> None:
        entering = asyncio.create_task(enter())
        await asyncio.to_thread(entered.wait, 60)
        entering.cancel()
        with pytest.raises(asyncio.CancelledError):
            await entering
        let_go.set()

    asyncio.run(main())
    wait_until(lambda: len(store.prepares) == 1)
    store.say_prepared(0)
    ((verdict, callback),) = store.decides
    callback(None)

    assert verdict is Verdict.ROLLBACK
    assert producer.statistics().in_flight == 0
    assert store.watched == set()


def test_an_async_block_that_was_cancelled_as_it_asked_for_its_target_is_not_entered_again(store: MuteStore) -> None:
    asked, let_go = threading.Event(), threading.Event()

    def ask(*_: object) -> None:
        asked.set()
        let_go.wait(60)

    store.require_target = ask  # type: ignore[method-assign] # slow, as one that asks brokers
    producer = TransactionalProducer("orders", store=store).start()

    async def main() -> None:
        transaction = producer.transaction("t", value=b"v")
        entering = asyncio.create_task(transaction.__aenter__())
        await asyncio.to_thread(asked.wait, 60)
        entering.cancel()
        with pytest.raises(asyncio.CancelledError):
            await entering
        let_go.set()
        with pytest.raises(TransactionError, match="was entered before"):
            await asyncio.wait_for(transaction.__aenter__(), 30)

    asyncio.run(main())
    producer.stop()


def test_a_block_that_could_not_be_watched_has_no_result_and_takes_no_room(store: MuteStore) -> None:
    def watch(*_: object) -> NoReturn:
        raise BrokerConnectionError("the done log cannot be read")

    store.watch = watch  # type: ignore[method-assign] # as one whose brokers are away
    producer = TransactionalProducer("orders", store=store, wait="published").start()
    transaction = producer.transaction("t", value=b"v")

    with pytest.raises(BrokerConnectionError), transaction:
        raise AssertionError("its half was not stored")

    with pytest.raises(TransactionError, match="has no result"):
        _ = transaction.result
    assert (store.prepares, producer._core.count, producer._core.bytes) == ([], 0, 0)
    producer.stop()


def test_a_send_that_is_interrupted_behind_its_store_gives_its_room_back_once(store: MuteStore) -> None:
    def interrupted(halves: Sequence[Half], callback: PreparedCallback, _: bytes | None) -> NoReturn:
        callback(Kept(halves))
        raise KeyboardInterrupt

    store.prepare = interrupted  # type: ignore[method-assign, assignment] # the signal comes as it returns
    producer = TransactionalProducer("orders", store=store).start()

    with pytest.raises(KeyboardInterrupt):
        producer.submit("t", value=b"v")
    ((verdict, answer),) = store.decides
    answer(None)

    assert verdict is Verdict.COMMIT
    assert (producer._core.count, producer._core.bytes) == (0, 0)
    producer.stop()


@pytest.mark.parametrize("step", ["_gate", "forget", "decide"])
def test_a_block_that_is_interrupted_at_its_end_is_not_waited_for(
    store: MuteStore, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    def interrupted(*given: Any) -> NoReturn:
        if step == "decide":
            given[-1](None)
        raise KeyboardInterrupt

    store.prepare = lambda halves, callback, _: callback(Kept(halves))  # type: ignore[method-assign, assignment] # at once
    producer = TransactionalProducer("orders", store=store, wait="published").start()
    transaction = producer.transaction("t", value=b"v").__enter__()
    if step == "forget":
        transaction.unknown()
    monkeypatch.setattr(Transaction if step == "_gate" else store, step, interrupted)

    with pytest.raises(KeyboardInterrupt):
        transaction.__exit__(None, None, None)

    assert producer._core._waiters() == []
    with pytest.raises(TransactionError, match="has no result"):
        _ = transaction.result
    producer.stop()


def test_an_event_loop_that_closes_as_a_message_ends_blocks_no_other_callback(
    store: MuteStore,
) -> None:
    producer = TransactionalProducer("orders", store=store).start()
    sent, heard = producer.submit("t", value=b"v"), list[object]()

    def closed(*_: object) -> NoReturn:
        raise RuntimeError("Event loop is closed")

    async def main() -> None:
        waiting = asyncio.ensure_future(sent)
        await asyncio.sleep(0)
        sent.add_done_callback(heard.append)
        with pytest.MonkeyPatch.context() as patch:
            # From here on the loop is as one that was closed behind a look at whether it is.
            patch.setattr(asyncio.get_running_loop(), "call_soon_threadsafe", closed)
            store.say_prepared(0)
            ((_, answer),) = store.decides
            answer(None)
        waiting.cancel()

    asyncio.run(main())

    assert heard == [sent]
    producer.stop()
