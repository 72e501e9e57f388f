"""Asking again until the answer is as wanted, within a time limit: tenacity decides."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import tenacity

T = TypeVar("T")


def ask_again(
    ask: Callable[[], T],
    limit_s: float,
    every_s: float,
    *,
    until: Callable[[T], bool] = bool,
    passes: Callable[[BaseException], bool] = lambda _error: False,
) -> T:
    """Return what `ask` gives, asked every `every_s` seconds until `until` says that it is what is waited for.

    Once `limit_s` seconds have passed, the last answer is returned as it is. What `ask` raises is raised: at once, or
    as the last answer where `passes` says that it may pass. It waits on the thread of the caller.
    """
    return tenacity.Retrying(
        stop=tenacity.stop_after_delay(limit_s),
        wait=tenacity.wait_fixed(every_s),
        retry=tenacity.retry_if_not_result(until) | tenacity.retry_if_exception(passes),
        retry_error_callback=_last,
    )(ask)


def _last(state: tenacity.RetryCallState) -> Any:
    """Return what the last try returned, or raise what it raised."""
    return state.outcome.result() if state.outcome is not None else None
