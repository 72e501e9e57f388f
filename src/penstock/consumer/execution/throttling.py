"""Throttling: what waits in a lane for the rate of its handler, while the lane goes on with the messages of others.

A rate is one for all keys of a handler, so nothing is parked: the runs of the handler step aside as they are, and what
comes for it later goes behind them. So a key keeps its order, and a throttled handler costs a place in the bucket for
each lane, however many messages wait. Called by visits, each for the lane it holds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from functools import partial

from penstock.consumer.assignments import ConsumerLane, ConsumerParked, ConsumerThrottled
from penstock.consumer.handlers.rate_limits import TokenBucket
from penstock.routing import ThrottledRuns


class Throttling:
    """Lets runs and parked keys wait for a rate. Thread-safe: each call is for a lane that the caller holds.

    Args:
        wake_key: has a parked key, or the runs that a token bucket throttles, looked at; any thread may call it.
    """

    def __init__(self, wake_key: Callable[[ConsumerLane, Hashable], None]) -> None:
        self._wake_key = wake_key
        #: How often assignments were dropped: what is held is searched for theirs. Raised before it is woken.
        self.dropped = 0

    def begin(self, lane: ConsumerLane, token_bucket: TokenBucket) -> None:
        """Let the first of a lane's runs step aside; `token_bucket` let no more through."""
        throttled = lane.throttled[token_bucket] = ThrottledRuns()
        throttled.dropped = self.dropped
        throttled.runs.append(lane.runs.popleft())
        self.line_up(lane, token_bucket, throttled)

    def line_up(self, lane: ConsumerLane, token_bucket: TokenBucket, throttled: ConsumerThrottled) -> None:
        """Let held runs wait in the line of all lanes, by the age of their first message."""
        if not throttled.asked:
            throttled.asked = True
            run = throttled.runs[0]
            token_bucket.wait(
                run.arrival + run.indexes[run.next], partial(self._let_ask, lane, token_bucket, throttled)
            )

    def line_up_key(self, lane: ConsumerLane, token_bucket: TokenBucket, key: Hashable, parked: ConsumerParked) -> None:
        """Let the head of a parked key wait, before all lanes: it has waited longer."""
        if not parked.asked:
            parked.asked = True
            token_bucket.wait(0, partial(self._let_ask, lane, key, parked))

    def _let_ask(self, lane: ConsumerLane, key: Hashable, who: ConsumerThrottled | ConsumerParked) -> None:
        who.asked = False
        self._wake_key(lane, key)

    def sweep(self, throttled: ConsumerThrottled) -> None:
        """Forget runs of dropped assignments: they would stay, counted by nobody, as long as the rate holds them."""
        if throttled.dropped != self.dropped:
            throttled.dropped = self.dropped
            throttled.runs = deque(run for run in throttled.runs if run.owner.assignment.active)


__all__ = ["Throttling"]
