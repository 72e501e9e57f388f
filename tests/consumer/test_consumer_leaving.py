"""Leaving the group where the client library raises: the app ends in order, and the log says why."""

from __future__ import annotations

import threading

import pytest

from penstock.consumer.poll.membership import Membership
from penstock.consumer.poll.stop_request import StopRequest
from penstock.consumer.settings import ConsumerSettings
from penstock.testing import TestClock


def test_a_poll_thread_that_hangs_before_it_leaves_holds_no_stop(caplog: pytest.LogCaptureFixture) -> None:
    clock = TestClock()
    membership = object.__new__(Membership)
    membership.clock, membership.group, membership.leaving = clock, "shop", threading.Event()
    membership._abandoned = False
    membership.stop_request = StopRequest(ConsumerSettings(), clock)

    clock.advance(3600)
    while_it_runs = membership.leaving_takes_too_long()
    membership.stop_request.drain(10)
    clock.advance(10)
    in_time = membership.leaving_takes_too_long()
    clock.advance(10)
    too_late = [membership.leaving_takes_too_long() for _ in range(2)]

    assert (while_it_runs, in_time, too_late) == (False, False, [True, True])
    assert caplog.text.count("shop cannot leave its group: a call of its Kafka client does not return") == 1
