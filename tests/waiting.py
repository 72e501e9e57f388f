"""Waiting for a condition with a deadline, in place of sleeping and hoping."""

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
        interval: seconds between two questions.
    """
    deadline = time.monotonic() + timeout
    while not (answer := condition()):
        if time.monotonic() > deadline:
            name = getattr(condition, "__qualname__", repr(condition))
            raise AssertionError(f"{name} was not true within {timeout:g} s; its last answer: {answer!r}")
        time.sleep(interval)
    return answer
