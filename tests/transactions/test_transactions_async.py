"""Transactions from an event loop, which none of them holds up."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
from transaction_tools import Bench

from penstock.errors import BufferFullError, HalfNotStoredError, StoppedError, TopicNotFoundError
from penstock.transactions import Outgoing, Transaction, TransactionalProducer, TransactionState
from waiting import wait_until


def test_many_async_transactions_fly_at_once_and_the_loop_goes_on(bench: Bench) -> None:
    coordinator, producer = bench.coordinator(), bench.producer()
    turns: list[float] = []

    async def local(tx: Transaction) -> TransactionState:
        await asyncio.sleep(0.01)
        return TransactionState.ROLLBACK if int(tx.message.value or b"") % 3 == 0 else TransactionState.COMMIT

    async def clock() -> None:
        while True:
            turns.append(time.monotonic())
            await asyncio.sleep(0.001)

    async def main() -> None:
        ticking = asyncio.create_task(clock())
        await asyncio.gather(
            *(producer.send_async(bench.topic, value=b"%d" % number, execute=local) for number in range(300))
        )
        ticking.cancel()

    asyncio.run(main())
    bench.settled(coordinator, committed=200, rolled_back=100)

    assert len(turns) > 3
    assert {value for _, value in bench.visible()} == {b"%d" % number for number in range(300) if number % 3}


def test_a_producer_is_started_and_stopped_by_an_async_block_and_the_loop_goes_on(bench: Bench) -> None:
    stopped_in: list[str] = []

    class Watched(TransactionalProducer):
        def stop(self, timeout: float = 30.0) -> None:
            stopped_in.append(threading.current_thread().name)
            super().stop(timeout)

    async def main() -> TransactionState:
        producer = Watched("orders", bootstrap_servers=bench.servers, prefix=bench.topics.prefix)
        async with producer as entered:
            assert entered is producer
            sent = await producer.send_async(bench.topic, value=b"v")
        with pytest.raises(StoppedError):
            await producer.send_async(bench.topic, value=b"too late")
        return sent.state

    assert asyncio.run(main()) is TransactionState.COMMIT
    assert stopped_in
    assert threading.main_thread().name not in stopped_in


def test_submitted_messages_can_be_awaited_from_two_loops(bench: Bench) -> None:
    coordinator, producer = bench.coordinator(), bench.producer()

    async def main() -> set[TransactionState]:
        pledges = [producer.submit(bench.topic, value=b"v") for _ in range(100)]
        return {(await pledge).state for pledge in pledges}

    assert asyncio.run(main()) == asyncio.run(main()) == {TransactionState.COMMIT}
    bench.settled(coordinator, committed=200)


def test_an_async_block_commits_rolls_back_and_stores_several(bench: Bench) -> None:
    producer = bench.producer()

    async def main() -> None:
        async with producer.transaction(bench.topic, value=b"1"):
            assert len(await asyncio.to_thread(bench.messages, bench.topics.half)) == 1
        with pytest.raises(RuntimeError, match="no stock"):
            async with producer.transaction(bench.topic, value=b"2"):
                raise RuntimeError("no stock")
        async with producer.transaction_of([Outgoing(bench.topic, b"3"), Outgoing(bench.topic, b"4")]) as tx:
            tx.unknown()
        async with producer.transaction_of([Outgoing(bench.topic, b"5")]):
            pass

    asyncio.run(main())

    statistics = producer.statistics()
    assert (statistics.committed, statistics.rolled_back, statistics.unknown) == (2, 1, 1)


def test_cancelling_an_async_transaction_leaves_it_to_the_check(bench: Bench) -> None:
    coordinator, producer = bench.coordinator(), bench.producer(check=lambda _: TransactionState.COMMIT)

    async def main() -> None:
        inside = asyncio.Event()

        async def transact() -> None:
            async with producer.transaction(bench.topic, value=b"v"):
                inside.set()
                await asyncio.sleep(600)

        task = asyncio.create_task(transact())
        await inside.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    bench.settled(coordinator, committed=1)

    assert producer.statistics().unknown == 1
    assert bench.visible() == [(None, b"v")]


def test_cancelling_before_the_block_ran_rolls_back(bench: Bench) -> None:
    coordinator, producer = bench.coordinator(), bench.producer()
    producer.send(bench.topic, value=b"warm")
    ran: list[int] = []

    async def main() -> None:
        async def transact() -> None:
            async with producer.transaction(bench.topic, value=b"v"):
                ran.append(1)

        # The half is on its way at once: the target is known.
        producer._core.known_targets.add((bench.topic, None))
        task = asyncio.create_task(transact())
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    bench.settled(coordinator, committed=1, rolled_back=1)

    assert ran == []
    wait_until(lambda: producer.statistics().in_flight == 0)


def test_errors_reach_who_awaits(bench: Bench) -> None:
    producer = bench.producer(max_in_flight=1, when_full="raise")

    async def main() -> None:
        with pytest.raises(TopicNotFoundError, match="nowhere"):
            await producer.send_async("nowhere", value=b"v")
        with pytest.raises(HalfNotStoredError, match="did not run"):
            await producer.send_async(bench.topic, value=bytes(2_000_000))
        async with producer.transaction(bench.topic, value=b"v"):
            with pytest.raises(BufferFullError, match="in flight"):
                await producer.send_async(bench.topic, value=b"w")

    asyncio.run(main())
