"""The fetcher alone: what it asks the client for, with a client and a router that note it."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.consumer.poll.fetcher import Fetcher
from penstock.testing import TestClock


class Record:
    """A record of the client, as far as the fetcher looks at it."""

    def error(self) -> None:
        """Return no error."""


class Noting:
    """A client that has so many messages, back-pressure with a limit, and a router; they note what they are asked."""

    def __init__(self, there: int, fetch_limit: int) -> None:
        self.client, self.fetch_limit, self.in_flight = self, fetch_limit, 0
        self._there = there
        self.asked: list[int] = []
        self.routed: list[int] = []

    def apply(self, *_: object) -> bool:
        return True

    def consume(self, most: int, _timeout: float) -> list[Record]:
        self.asked.append(most)
        found = min(most, self._there)
        self._there -= found
        return [Record()] * found

    def poll(self, _timeout: float) -> None:
        return None

    def all(self) -> list[object]:
        return []

    def route(self, batch: list[Record], _now: float) -> None:
        self.routed.append(len(batch))


@pytest.mark.parametrize(
    ("there", "fetch_limit", "asked", "routed"),
    [
        (10_000, 1_200, [500, 500, 200], [1_200]),
        (700, 10_000, [500, 500], [700]),
        (3, 2, [2], [2]),
        (0, 10_000, [500], []),
    ],
)
def test_the_client_hands_over_a_large_fetch_in_pieces_and_it_is_routed_as_a_whole(
    there: int, fetch_limit: int, asked: list[int], routed: list[int]
) -> None:
    parts: Any = Noting(there, fetch_limit)
    fetcher = Fetcher(
        membership=parts,
        clock=TestClock(),
        assignments=parts,
        back_pressure=parts,
        router=parts,
        errors=parts,
        polled=None,
    )

    fetcher.fetch(lambda _: 0.0)

    assert (parts.asked, parts.routed) == (asked, routed)
