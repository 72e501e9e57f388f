"""Waiting for a condition with a deadline, instead of sleeping and hoping."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def wait_until(condition: Callable[[], T], timeout: float = 60.0, interval: float = 0.02) -> T:
    """Return the first true answer of `condition`, or fail the test after `timeout` seconds.

    Args:
        condition: asked again and again; its last answer is shown in the failure.
        timeout: seconds.
        interval: seconds between two questions, at least; where an answer takes long, there are fewer.
    """
    deadline = time.monotonic() + timeout
    asked = time.monotonic()
    while not (answer := condition()):
        now = time.monotonic()
        if now > deadline:
            name = getattr(condition, "__qualname__", repr(condition))
            raise AssertionError(f"{name} was not true within {timeout:g} s; its last answer: {answer!r}")
        # Asking shall not keep busy what is waited for.
        time.sleep(max(interval, min(3 * (now - asked), 1.0)))
        asked = time.monotonic()
    return answer
