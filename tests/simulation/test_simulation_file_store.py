"""I8 for the file store: with its log cut at any byte, it returns to the acknowledged state, or says that it cannot.

`make simulate` makes ten thousand runs. One seed alone: PENSTOCK_SIMULATION_SEED=<seed>.
"""

# ruff: noqa: ARG004, ARG005 - what is planted takes the arguments of what it replaces

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from penstock.errors import StoreDamagedError
from penstock.transactions.stores.file.log import entries, frames
from penstock.transactions.stores.file.log import journal as journals
from penstock.transactions.stores.file.log.journal import Journal
from penstock.transactions.stores.file.log.redo import SUFFIX, RedoLog
from penstock.transactions.stores.file.log.table import _SEAL, StateTable
from penstock.transactions.stores.file.open_store import OpenStore
from penstock.transactions.stores.relayed_store import Decide
from penstock.transactions.wire.ops import Verdict
from simulation.file_store_runs import run
from simulation.torn_disk import TornDisk
from simulation.varied import RUNS, chunks, thorough

#: In how many seeds a defect must show.
SEEDS = 300

Plant = Callable[[pytest.MonkeyPatch], None]


@pytest.mark.parametrize(("first", "count"), chunks(RUNS))
def test_the_file_store_comes_back_to_what_it_acknowledged(first: int, count: int) -> None:
    for seed in range(first, first + count):
        run(seed)


@thorough
def test_all_that_can_befall_a_file_store_does() -> None:
    seen: Counter[str] = Counter()
    torn = 0
    for seed in range(200):
        made = run(seed)
        seen.update(made.seen)
        torn += made.disk.torn

    assert torn > 0
    wanted = {
        "crash",
        "crash while opening",
        "came after all",
        "no room",
        "rotated",
        "removed",
        "damage refused",
        "failed sync",
        "crash while stopping",
        "table taken over",
        "table made again",
    }
    assert {name for name, count in seen.items() if count} >= wanted | {
        f"damage: {how}" for how in ("flip", "zero", "cut", "garbage", "foreign")
    } | {f"table: {how}" for how in ("missing", "torn", "older", "kept")}


def acknowledges_before_the_sync(patch: pytest.MonkeyPatch) -> None:
    """Frames are acknowledged when they are written."""
    patch.setattr(TornDisk, "sync", lambda self, name: self._tick())


def forgets_to_sync_the_names(patch: pytest.MonkeyPatch) -> None:
    """A new segment's name may be gone after a power cut."""
    patch.setattr(TornDisk, "sync_names", lambda self: self._tick())


def cuts_in_the_middle(patch: pytest.MonkeyPatch) -> None:
    """Data behind damage is cut off with it."""
    patch.setattr(frames, "_stray", lambda *_: None)


def ignores_the_mark(patch: pytest.MonkeyPatch) -> None:
    """A missing acknowledged end counts as one that never was."""
    patch.setattr(RedoLog, "_read_mark", lambda *_: None)


def skips_the_checksums(patch: pytest.MonkeyPatch) -> None:
    """Every sum is right."""

    class Trusting:
        @staticmethod
        def crc32(data: bytes, begin: int = 0) -> int:
            return 0

    patch.setattr(frames, "zlib", Trusting)


def does_not_sync_what_it_found(patch: pytest.MonkeyPatch) -> None:
    """Data that was read at the opening may be only in the cache."""
    recover, sync = RedoLog.recover, TornDisk.sync

    def recovering(self: RedoLog) -> None:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(TornDisk, "sync", lambda disk, name: disk._tick())
            recover(self)
        assert TornDisk.sync is sync

    patch.setattr(RedoLog, "recover", recovering)


def trusts_the_cache(patch: pytest.MonkeyPatch) -> None:
    """The last frame is not written again when the store is opened: after a sync that failed, another does nothing."""
    recover, write = RedoLog.recover, TornDisk.write

    def recovering(self: RedoLog) -> None:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(TornDisk, "write", lambda disk, name, offset, data: disk._tick())
            recover(self)
        assert TornDisk.write is write

    patch.setattr(RedoLog, "recover", recovering)


def removes_segments_that_are_needed(patch: pytest.MonkeyPatch) -> None:
    """A pending transaction does not keep its segment."""
    patch.setattr(Journal, "_floor", lambda self: self.redo.end)


def forgets_decisions_it_carries(patch: pytest.MonkeyPatch) -> None:
    """A decided half that is written again is undecided."""
    entries_of = entries.entries_of
    patch.setattr(journals, "entries_of", lambda stored: entries_of(stored)[:1])


def trusts_any_table(patch: pytest.MonkeyPatch) -> None:
    """The state table is not checked for completeness."""
    patch.setattr(StateTable, "_checksums", lambda *_: (0, 0))


def trusts_a_table_of_another_time(patch: pytest.MonkeyPatch) -> None:
    """The log's end is not compared with the end in the state table's seal."""
    unseal = StateTable.unseal
    patch.setattr(StateTable, "unseal", lambda self, seal, log_end: unseal(self, seal, seal[_SEAL.size : -4]))


def lets_the_last_decision_win(patch: pytest.MonkeyPatch) -> None:
    """A later decision replaces an earlier one."""
    judge = OpenStore._judge_decision

    def decided(self: OpenStore, change: Decide, taken: Any) -> Any:
        stored = self.find(change.transaction_id)
        if stored is not None and change.verdict is not Verdict.UNKNOWN:
            stored.verdict = None
        return judge(self, change, taken)

    patch.setattr(OpenStore, "_judge_decision", decided)


@thorough
@pytest.mark.parametrize(
    "plant",
    [
        acknowledges_before_the_sync,
        forgets_to_sync_the_names,
        cuts_in_the_middle,
        ignores_the_mark,
        skips_the_checksums,
        does_not_sync_what_it_found,
        trusts_the_cache,
        removes_segments_that_are_needed,
        forgets_decisions_it_carries,
        lets_the_last_decision_win,
        trusts_any_table,
        trusts_a_table_of_another_time,
    ],
    ids=lambda plant: plant.__name__,
)
def test_a_planted_defect_is_found(plant: Plant) -> None:
    found = 0
    with pytest.MonkeyPatch.context() as patch:
        plant(patch)
        for seed in range(SEEDS):
            try:
                run(seed)
            except (AssertionError, LookupError, ValueError, StoreDamagedError):
                found += 1
                break

    assert found, f"{plant.__name__} went unseen"


def test_a_run_is_the_same_again() -> None:
    first, again = run(7), run(7)

    assert first.seen == again.seen
    assert first.disk.operations == again.disk.operations


def test_a_file_that_tears_really_tears() -> None:
    disk = TornDisk(random.Random(1))  # noqa: S311 - the same disk again
    disk.write("a" + SUFFIX, 0, b"x" * 64)
    disk.sync("a" + SUFFIX)
    disk.sync_names()
    outcomes = set()
    for _ in range(50):
        disk.write("a" + SUFFIX, 0, b"y" * 64)
        disk.restart(power=True)
        outcomes.add(disk.read("a" + SUFFIX))
        disk.write("a" + SUFFIX, 0, b"x" * 64)
        disk.sync("a" + SUFFIX)

    assert {b"x" * 64, b"y" * 64} < outcomes
