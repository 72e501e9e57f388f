"""What a signal handler sets while the thread that it interrupts waits for just that."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, cast

from stepped import Stepped

from penstock.consumer import handler
from penstock.running import RunningApp
from penstock.spark_sink.queries.app_sinks import AppSinks


class Sinks:
    """Sinks that go on."""

    ended = False

    def raise_failure(self) -> None:
        """Have none."""

    def request_stop(self, *, now: bool = False) -> None:
        """Go on all the same."""


def interrupted_everywhere(call: Callable[[], object], signal_handler: Callable[[], object]) -> bool:
    """Run a call with a handler at every line of it, on one thread, as signals come; return whether it ended."""

    def at_each_line(_frame: FrameType, event: str, _argument: object) -> Any:
        if event == "line":
            sys.settrace(None)
            signal_handler()
            sys.settrace(at_each_line)
        return at_each_line

    def run() -> None:
        sys.settrace(at_each_line)
        try:
            call()
        finally:
            sys.settrace(None)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(20)
    return not thread.is_alive()


def test_a_signal_while_an_app_with_sinks_only_is_waited_for_ends_the_wait() -> None:
    running = RunningApp(None, None, [], cast("AppSinks", Sinks()))
    ended: list[bool] = []

    assert interrupted_everywhere(lambda: ended.append(running.wait(5)), running._stop_requested.set)
    assert ended == [True]


def test_a_signal_while_a_stop_is_asked_for_asks_once_more() -> None:
    stepped = Stepped({"t": handler(print)})
    loop = stepped.loop

    def leave() -> None:
        loop.stop_request.leave(1.0)

    assert interrupted_everywhere(loop.stop_request.drain, loop.stop_request.drain)
    assert interrupted_everywhere(leave, leave)
    loop.run()
    assert loop.membership.leaving.is_set()
