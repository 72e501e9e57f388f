"""Throttling: what waits in a lane for a token of its handler's rate, while the lane goes on with other messages.

A rate is one for all keys of a handler, so nothing is parked: the runs of the handler step aside as they are, and what
comes for it later goes behind them. So a key keeps its order, and a throttled handler costs one waiter in its token
bucket for each lane, however many messages wait. Each call is for a lane that the caller holds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable
from functools import partial

from penstock.consumer.assignments import ConsumerLane, ConsumerParked, ConsumerThrottled
from penstock.consumer.handlers.options.rate_limits import TokenBucket
from penstock.routing import ThrottledRuns


class Throttling:
    """Lets runs and parked keys wait for tokens. Thread-safe: each call is for a lane that the caller holds."""

    def __init__(self, wake_key: Callable[[ConsumerLane, Hashable], None]) -> None:
        self._wake_key = wake_key
        #: How often assignments were dropped: throttled runs are searched for theirs. Raised before they are woken.
        self.dropped = 0

    def begin(self, lane: ConsumerLane, token_bucket: TokenBucket) -> None:
        """Let the first of a lane's runs step aside; no token is left for it."""
        throttled = lane.throttled[token_bucket] = ThrottledRuns()
        throttled.dropped = self.dropped
        throttled.runs.append(lane.runs.popleft())
        self.await_token(lane, token_bucket, throttled)

    def await_token(self, lane: ConsumerLane, token_bucket: TokenBucket, throttled: ConsumerThrottled) -> None:
        """Let throttled runs wait for a token, among those of all lanes by the age of their first message."""
        if not throttled.awaits_token:
            throttled.awaits_token = True
            run = throttled.runs[0]
            arrival = run.arrival + run.indexes[run.next]
            token_bucket.wait(arrival, partial(self._wake, lane, token_bucket, throttled))

    def await_token_for_key(self, lane: ConsumerLane, key: Hashable, parked: ConsumerParked) -> None:
        """Let the head of a parked key wait for a token, before the runs of all lanes: it has waited longer."""
        if not parked.awaits_token:
            parked.awaits_token = True
            token_bucket = parked.waiting[0][0].assignment.route.token_bucket
            token_bucket.wait(0, partial(self._wake, lane, key, parked))

    def _wake(self, lane: ConsumerLane, key: Hashable, waiter: ConsumerThrottled | ConsumerParked) -> None:
        # First: the holder may ask for a token again as soon as the key is woken.
        waiter.awaits_token = False
        self._wake_key(lane, key)

    def drop_inactive(self, throttled: ConsumerThrottled) -> None:
        """Drop runs of inactive assignments: they would stay, counted by nobody, as long as no token comes."""
        if throttled.dropped != self.dropped:
            throttled.dropped = self.dropped
            throttled.runs = deque(run for run in throttled.runs if run.owner.assignment.active)
