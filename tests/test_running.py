"""A running app: signals while a lifespan hangs."""

from __future__ import annotations

import signal
from collections.abc import Iterator

import pytest

from penstock.running import RunningApp, run_until_signal


@pytest.mark.parametrize(("place", "signals"), [("start", 2), ("end", 3)])
def test_one_signal_more_than_a_stop_takes_interrupts_a_lifespan_that_hangs(place: str, signals: int) -> None:
    log: list[str] = []

    def first() -> Iterator[None]:
        yield
        log.append("first ends")

    def hang(at: str) -> None:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGTERM)[: signals if at == place else 0]:
            signal.raise_signal(number)
        log.append(f"after the {at}")

    def hangs() -> Iterator[None]:
        hang("start")
        yield
        hang("end")

    running = RunningApp(None, None, [first, hangs])

    def start() -> RunningApp:
        running.start("app")
        return running

    with pytest.raises(KeyboardInterrupt):
        run_until_signal("app", start)

    assert log == [*(["after the start"] if place == "end" else []), "first ends"]
