"""A log that handlers on executors write, and the judgement of the order in it."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Handled:
    """One message that a handler has done."""

    key: str
    partition: int
    offset: int
    pid: int
    begun: float
    ended: float


def read_log(folder: Path) -> list[Handled]:
    """Return what handlers wrote, in the order of its end."""
    found = []
    for path in folder.glob("*.log"):
        lines = path.read_text().splitlines(keepends=True)
        # A process that was killed may have left half a line.
        found += [Handled(*json.loads(line)) for line in lines if line.endswith("\n")]
    return sorted(found, key=lambda one: one.ended)


def logging_handler(folder: Path, *, fails_once: int = 0, hold_at: int | None = None) -> Callable[..., None]:
    """Return a handler that logs into a file for each process. Made here: executors cannot import tests.

    Args:
        folder: where the logs are.
        fails_once: of so many offsets one fails at its first try.
        hold_at: at this offset of partition 0 it writes its process's number to a file `held` and waits for one, `go`.
    """
    where = str(folder)
    failed: set[tuple[int, int]] = set()

    def log(message: Any) -> None:
        import json
        import os
        import time

        begun, place = time.time(), (message.partition, message.offset)
        if fails_once and message.offset % fails_once == 3 and place not in failed:
            failed.add(place)
            raise RuntimeError("not yet")
        if place == (0, hold_at):
            with open(f"{where}/held.new", "w") as held:  # noqa: PTH123 - executors cannot import this file
                held.write(str(os.getpid()))
            os.rename(f"{where}/held.new", f"{where}/held")  # noqa: PTH104 - the same
            deadline = time.monotonic() + 60
            # In an executor, which cannot import `wait_until`.
            while not os.path.exists(f"{where}/go") and time.monotonic() < deadline:  # noqa: PTH110 - the same
                time.sleep(0.02)
        line = [message.key.decode(), *place, os.getpid(), begun, time.time()]
        with open(f"{where}/{os.getpid()}.log", "a") as file:  # noqa: PTH123 - the same
            file.write(json.dumps(line) + "\n")

    return log


def judge(log: Sequence[Handled], expected: Mapping[str, Sequence[int]], *, restarts: int) -> None:
    """Assert I1 and I2 of a log.

    Args:
        log: in the order of ends.
        expected: the offsets of each key.
        restarts: how often work began again at most.
    """
    by_key: dict[str, list[Handled]] = defaultdict(list)
    for one in log:
        by_key[one.key].append(one)
    assert by_key.keys() == expected.keys()
    for key, calls in by_key.items():
        offsets = list(expected[key])
        successor = dict(pairwise(offsets))
        again = 0
        assert calls[0].offset == offsets[0]
        for former, later in pairwise(calls):
            assert former.ended <= later.begun, f"two of {key} at once (I1)"
            if later.offset <= former.offset:
                again += 1
            else:
                assert later.offset == successor[former.offset], f"{key} out of order (I2)"
        assert calls[-1].offset == offsets[-1]
        assert again <= restarts
