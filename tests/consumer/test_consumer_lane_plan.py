"""Which lanes handlers have: each lane for one kind of work, and batches that do not depend on other handlers."""

from __future__ import annotations

import pytest

from penstock.consumer import ConsumerSettings, Handler, handler
from penstock.consumer.execution.lane_plan import LanePlan
from penstock.errors import ConfigurationError
from penstock.message import Message


def plain(*_: object) -> None:
    """Do nothing."""


async def awaited(*_: object) -> None:
    """Do nothing."""


def lanes_of(plan: LanePlan, one: Handler) -> tuple[range, set[int]]:
    first, count = plan.group_of(one)
    return range(first, first + count), set(plan.queues[first : first + count])


def test_each_kind_has_lanes_of_its_own_in_one_queue_and_each_handler_of_batches_a_few() -> None:
    handlers = [handler(plain), handler(plain), handler(awaited), handler(plain, batch=9), handler(awaited, batch=100)]
    plan = LanePlan(handlers, ConsumerSettings(workers=4, max_concurrency=1_000))

    (threads, of_threads), others, (tasks, of_tasks), (batches, _), (async_batches, _) = (
        lanes_of(plan, one) for one in handlers
    )

    assert others == (threads, of_threads)
    assert [len(lanes) for lanes in (threads, tasks, batches, async_batches)] == [256, 8_000, 4, 10]
    assert len({*threads, *tasks, *batches, *async_batches}) == len(plan.queues)
    assert (of_threads, of_tasks) == ({0}, {plan.task_queue})


def test_handlers_of_one_key_space_have_the_same_lanes_whether_they_take_batches_or_not() -> None:
    together = [handler(plain, key_space="k"), handler(plain, key_space="k", batch=5)]
    plan = LanePlan([*together, handler(plain)], ConsumerSettings(workers=4))

    assert len({plan.group_of(one) for one in together}) == 1


def test_pinned_is_a_lane_and_a_queue_for_each_worker() -> None:
    handlers = [handler(plain), handler(plain, batch=5), handler(awaited)]
    plan = LanePlan(handlers, ConsumerSettings(workers=3, pinned=True))

    assert plan.queues == [0, 1, 2, 0, 1, 2, 3, 3, 3]


def test_a_plain_function_and_an_async_def_cannot_share_a_key_space() -> None:
    def orders(_message: Message) -> None:
        """Do nothing."""

    async def payments(_message: Message) -> None:
        """Do nothing."""

    handlers = [handler(orders, key_space="customer"), handler(payments, key_space="customer")]

    with pytest.raises(ConfigurationError, match="payments share key_space='customer'"):
        LanePlan(handlers, ConsumerSettings())
