"""Whether a consumer lives: its poll thread turns, its event loop does, and no message is in a handler for too long.

It tells times and judges nothing: what is too long is for whoever asks, such as `/healthz`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from penstock.consumer.execution_slot import ExecutionSlot

#: Seconds in which the poll thread turns whatever brokers do, the waits of a revocation left out.
_TURN_S = 30.0


@dataclass(frozen=True, slots=True)
class InHandler:
    """A message in a user's function: whose, where, and for how many seconds."""

    place: str
    handler: str
    worker: str
    seconds: float

    def __str__(self) -> str:
        return f"{self.place} has been in {self.handler} for {self.seconds:.1f} s on {self.worker}"


@dataclass(frozen=True, slots=True)
class Liveness:
    """A consumer's threads at one moment.

    Attributes:
        turned_s: seconds since the poll thread came round, or None while that is not to be expected: before its first
            turn, and from when it leaves the group.
        turn_limit_s: seconds after which it cannot be waiting for anything that has an end.
        loop_blocked_s: seconds for which the event loop has not come round; 0 where there is none.
        longest: the message that has been in a handler for longest, or None.
    """

    turned_s: float | None
    turn_limit_s: float
    loop_blocked_s: float
    longest: InHandler | None


def liveness_of(
    slots: Iterable[ExecutionSlot], now: float, turned_at: float | None, *, revoke_timeout: float, loop_blocked_s: float
) -> Liveness:
    """Return a consumer's threads at this moment. Any thread."""
    return Liveness(
        turned_s=None if turned_at is None else max(0.0, now - turned_at),
        # A revocation waits for handlers and then for its commit.
        turn_limit_s=_TURN_S + 2 * revoke_timeout,
        loop_blocked_s=loop_blocked_s,
        longest=longest_in_handler(slots, now),
    )


def longest_in_handler(slots: Iterable[ExecutionSlot], now: float) -> InHandler | None:
    """Return the message that has been in a handler for longest, or None. Any thread."""
    found: InHandler | None = None
    for slot in slots:
        # A slot writes `started` and then `record`, and goes on meanwhile: where `started` is the same after `record`
        # was read, they are of one message.
        started, record, fetch = slot.started, slot.record, slot.fetch
        if record is None or fetch is None or slot.started != started:
            continue
        if found is None or now - started > found.seconds:
            place = f"{fetch.assignment}@{record.offset()}"
            found = InHandler(place, fetch.assignment.route.handler.name, slot.name, max(0.0, now - started))
    return found
