"""Which lanes handlers have: each lane for one kind of work, and batches that do not depend on other handlers."""

from __future__ import annotations

import pytest

from penstock.consumer import ConsumerSettings, handler
from penstock.consumer.execution.lane_plan import LanePlan
from penstock.errors import ConfigurationError


def plain(*_: object) -> None:
    """Do nothing."""


async def awaited(*_: object) -> None:
    """Do nothing."""


def test_each_kind_has_lanes_of_its_own_in_one_queue_and_each_handler_of_batches_a_few() -> None:
    handlers = [handler(plain), handler(plain), handler(awaited), handler(plain, batch=9), handler(awaited, batch=100)]
    plan = LanePlan(handlers, ConsumerSettings(workers=4, max_concurrency=1_000))

    assert [plan.group_of(one) for one in handlers] == [(0, 256), (0, 256), (256, 8_000), (8_256, 4), (8_260, 10)]
    assert plan.queues == [0] * 256 + [1] * 8_000 + [0] * 4 + [1] * 10


def test_pinned_is_a_lane_and_a_queue_for_each_worker() -> None:
    handlers = [handler(plain), handler(plain, batch=5), handler(awaited)]

    assert LanePlan(handlers, ConsumerSettings(workers=3, pinned=True)).queues == [0, 1, 2, 0, 1, 2, 3, 3, 3]


def test_handlers_of_one_key_space_have_the_same_lanes_and_are_of_one_kind() -> None:
    together = [handler(plain, key_space="k"), handler(plain, key_space="k", batch=5)]
    plan = LanePlan([*together, handler(plain)], ConsumerSettings(workers=4))

    assert len({plan.group_of(one) for one in together}) == 1
    with pytest.raises(ConfigurationError, match="plain and awaited share key_space='k'"):
        LanePlan([*together, handler(awaited, key_space="k")], ConsumerSettings())
