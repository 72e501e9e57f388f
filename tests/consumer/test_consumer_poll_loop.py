"""How long the poll thread waits for a message."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from penstock.consumer.polling.poll_loop import PollLoop
from penstock.consumer.publishing.result_publisher import ResultPublisher
from penstock.consumer.publishing.transactional_publisher import TransactionalPublisher


@pytest.mark.parametrize(
    ("publisher", "at_most_s", "at_least_s"), [(ResultPublisher, 0.005, 0.0), (TransactionalPublisher, 0.05, 0.05)]
)
@pytest.mark.parametrize("waiting", [0, 3])
def test_the_poll_thread_wakes_for_results_only_where_it_sends_them_itself(
    publisher: type[Any], waiting: int, at_most_s: float, at_least_s: float
) -> None:
    results = SimpleNamespace(needs_serving=publisher.needs_serving, waiting=waiting, is_used=True)
    loop = SimpleNamespace(
        publisher=SimpleNamespace(waiting=0),
        results=results,
        token_buckets=(),
        timers=SimpleNamespace(next_due=lambda: None),
        _workers_wanted=False,
        _some_in_flight=lambda: True,
    )

    timeout_s = PollLoop._poll_timeout(cast("PollLoop", loop), 0.0)

    assert at_least_s <= timeout_s <= at_most_s


def test_the_poll_thread_wakes_for_what_was_given_up_and_is_not_told_of() -> None:
    loop = SimpleNamespace(publisher=SimpleNamespace(waiting=1), _workers_wanted=False)

    assert PollLoop._poll_timeout(cast("PollLoop", loop), 0.0) <= 0.005
