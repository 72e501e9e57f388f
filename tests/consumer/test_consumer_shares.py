"""What failing keys and healthy ones get of the workers: neither starves the other. On a clock moved by hand."""

from __future__ import annotations

import pytest
import tenacity
from stepped import Stepped

from penstock.consumer import handler, retry
from penstock.message import Message

#: Seconds that every call takes, and a step of the clock.
CALL_S = 0.005
WORKERS = 16
FOR_EVER = retry(stop=tenacity.stop_never, wait=tenacity.wait_fixed(0.05))


class Fails:
    """Fails what is bad."""

    def __init__(self) -> None:
        self.healthy = self.failing = 0
        self.failed: set[bytes | None] = set()

    def __call__(self, message: Message) -> None:
        """Count, and fail."""
        if (message.key or b"").startswith(b"bad"):
            self.failing += 1
            self.failed.add(message.key)
            raise ValueError
        self.healthy += 1


def work(stepped: Stepped, seconds: float) -> None:
    """Let all workers work side by side for so long, each call taking its time."""
    for _ in range(round(seconds / CALL_S)):
        stepped.poll()
        for worker in stepped.consumer.workers:
            if worker.lane is None:
                worker.take()
        stepped.broker.advance(CALL_S)
        for worker in stepped.consumer.workers:
            if worker.work is not None:
                stepped.finish(worker)


def healthy_share(failing_keys: int, seconds: float, **settings: object) -> tuple[float, int]:
    """Return the part of what is possible that healthy keys get beside failing ones, and the calls of those."""
    seen = Fails()
    stepped = Stepped(
        {"t": handler(seen, retry=FOR_EVER)},
        workers=WORKERS,
        max_in_flight=3_000,
        max_in_flight_bytes=1 << 32,
        **settings,
    )
    for number in range(failing_keys):
        stepped.broker.produce("t", b"", key=b"bad%d" % number)
    for number in range(20_000):
        stepped.broker.produce("t", b"", key=b"good%d" % (number % 997))
    # Until all that fails has failed once; were there nothing else, it would take 0.6 s.
    for _ in range(40):
        if len(seen.failed) < failing_keys:
            work(stepped, 0.05)
    assert len(seen.failed) == failing_keys
    healthy, failing = seen.healthy, seen.failing
    work(stepped, seconds)
    return (seen.healthy - healthy) / (seconds / CALL_S * WORKERS), seen.failing - failing


@pytest.mark.parametrize("settings", [{}, {"lanes_per_worker": 1}, {"pinned": True}], ids=str)
def test_retries_without_end_leave_healthy_keys_half_of_the_workers(settings: dict[str, object]) -> None:
    alone, _ = healthy_share(0, 0.5, **settings)

    beside, retries = healthy_share(2_000, 1.5, **settings)

    assert alone > 0.9
    assert beside >= 0.5 * alone
    # And the retries go on.
    assert retries > 0.2 * 1.5 / CALL_S * WORKERS


def test_a_few_retries_do_not_wait_for_healthy_traffic() -> None:
    share, retries = healthy_share(10, 1.0)

    # Each 50 ms after the last try, and little more: a call, and the slice of a worker that is with another lane.
    assert retries >= 10 * 1.0 / 0.1
    assert share > 0.7
