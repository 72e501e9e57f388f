"""The fetcher: when it takes what."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from penstock.consumer.polling.fetcher import Fetcher
from penstock.testing.memory.clock import TestClock


class Fetched:
    """A message without an error."""

    def error(self) -> None:
        """Return none."""


class Client:
    """Has a message for each millisecond, or many at once."""

    def __init__(self, clock: TestClock) -> None:
        self.clock = clock
        self.taken = 0
        self.calls = 0

    def there(self) -> int:
        return int(self.clock.monotonic() * 1000 + 1e-6) - self.taken

    def consume(self, most: int, _timeout: float) -> list[Any]:
        self.calls += 1
        count = min(most, self.there())
        self.taken += count
        return [Fetched() for _ in range(count)]

    def poll(self, timeout: float) -> Any:
        self.clock.sleep(min(timeout, 0.001))
        return next(iter(self.consume(1, 0)), None)


def batches_in(seconds: float, gather_s: float, *, behind: int = 0, most: int = 10_000) -> tuple[list[int], float]:
    """Return how many messages each batch had, and when the first was taken."""
    clock = TestClock()
    client, begun = Client(clock), clock.monotonic()
    client.taken = client.there() - behind
    taken: list[tuple[int, float]] = []
    fetcher = Fetcher(
        membership=SimpleNamespace(client=client),  # type: ignore[arg-type] # as are the others: what is used of them
        clock=clock,
        assignments=SimpleNamespace(all=list),  # type: ignore[arg-type]
        back_pressure=SimpleNamespace(apply=lambda *_: True, fetch_limit=most, in_flight=0),  # type: ignore[arg-type]
        router=SimpleNamespace(route=lambda batch, _: taken.append((len(batch), clock.monotonic() - begun))),  # type: ignore[arg-type]
        errors=None,  # type: ignore[arg-type]
        polled=None,
        gather_s=gather_s,
    )
    while clock.monotonic() < begun + seconds:
        before = clock.monotonic()
        fetcher.fetch(lambda _: 0.05)
        # A step takes some time.
        clock.sleep(max(0.0, before + 0.0002 - clock.monotonic()))
    return [count for count, _ in taken], taken[0][1]


def test_what_comes_within_a_moment_is_taken_together_where_that_is_wanted() -> None:
    singly, _ = batches_in(1.0, 0.0)
    together, first_at = batches_in(1.0, 0.005)

    assert max(singly) <= 2
    assert 4 <= sum(together) / len(together) <= 7
    assert first_at <= 0.002, "the first after a pause is taken at once"


def test_a_backlog_is_taken_without_a_pause() -> None:
    found, _ = batches_in(0.02, 0.005, behind=20_000, most=1_000)

    assert found[:20] == [1_000] * 20
