"""Simulations find defects of transactions: planted in the state, the journal and the relay, each found in a few seeds.

More are planted with the simulations of the state (`test_simulation_partition_state`) and of the redo log
(`test_simulation_file_store`).
"""

# ruff: noqa: ARG005 - what is planted takes the arguments of what it replaces

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from partition_world import World
from penstock.transactions.core import queue, set_aside, state
from penstock.transactions.core.commit_batch import CommitBatch
from penstock.transactions.core.pending import Pending
from penstock.transactions.core.recovered_state import RecoveredNotes
from penstock.transactions.core.state import PartitionState
from penstock.transactions.stores.done_log import DoneRead
from penstock.transactions.stores.file.log.entries import Decided, StoredTransaction
from penstock.transactions.stores.file.open_store import OpenStore
from penstock.transactions.stores.file.shard import FileShard
from penstock.transactions.stores.relayed_store import Decide
from penstock.transactions.stores.shards import ShardBacklog
from penstock.transactions.wire.ops import Op, Verdict
from simulation import file_store_runs, relay_runs
from simulation.varied import ONE_SEED, RUNS, silence

CHUNK = 300
_RUNS = max(1, RUNS // 3)
CHUNKS = [(int(ONE_SEED), 1)] if ONE_SEED else [(begin, min(CHUNK, _RUNS - begin)) for begin in range(0, _RUNS, CHUNK)]
#: In how many seeds a defect must show.
SEEDS = 300

Plant = Callable[[pytest.MonkeyPatch], None]


@pytest.mark.parametrize(("first", "count"), CHUNKS)
def test_a_relay_publishes_once_what_was_committed_first_whatever_is_refused_in_doubt_or_restarted(
    first: int, count: int
) -> None:
    with silence():
        for seed in range(first, first + count):
            relay_runs.run(seed)


def test_all_that_can_befall_a_relay_does() -> None:
    seen: Counter[str] = Counter()
    with silence():
        for seed in range(20):
            seen += relay_runs.run(seed).kafka.happened

    assert set(seen) == {"trimmed", "refused", "in doubt, committed", "in doubt, lost"}


def publishes_what_was_rolled_back(patch: pytest.MonkeyPatch) -> None:
    """A ROLLBACK is taken for a COMMIT."""
    decide = PartitionState._decide

    def committing(self: PartitionState, pending: Any, op: Op, place: tuple[int, int]) -> None:
        decide(self, pending, op._replace(verdict=Verdict.COMMIT), place)

    patch.setattr(PartitionState, "_decide", committing)


def records_no_completion(patch: pytest.MonkeyPatch) -> None:
    """Published transactions leave no entry in the done log."""
    notes = CommitBatch.notes
    patch.setattr(CommitBatch, "notes", lambda self: [one for one in notes(self) if one.verdict is not Verdict.COMMIT])


def reads_no_completion(patch: pytest.MonkeyPatch) -> None:
    """The done log's entries about halves that are read again are ignored."""
    patch.setattr(RecoveredNotes, "note_on", lambda self, *place: None)


def obeys_other_groups_and_places(patch: pytest.MonkeyPatch) -> None:
    """A decision of any author counts, with any halves."""
    patch.setattr(state, "misfit", lambda pending, op: None)


def counts_every_answer(patch: pytest.MonkeyPatch) -> None:
    """An answer to a check that was never sent counts."""
    patch.setattr(state, "is_next_answer", lambda pending, op, place: pending.verdict is None)


def writes_every_answer_down(patch: pytest.MonkeyPatch) -> None:
    """The journal counts an answer to a check that was never sent."""
    judge = OpenStore._judge_decision

    def decided(self: OpenStore, change: Decide, taken: Any) -> Any:
        stored = self.find(change.transaction_id)
        number = change.check_number if stored is None else stored.check_count + 1
        return judge(self, change._replace(check_number=number), taken)

    patch.setattr(OpenStore, "_judge_decision", decided)


def lets_strangers_decide(patch: pytest.MonkeyPatch) -> None:
    """The journal does not check the group."""
    judge = OpenStore._judge_decision
    patch.setattr(
        OpenStore, "_judge_decision", lambda self, change, taken: judge(self, change._replace(group=None), taken)
    )


def accepts_decisions_on_nothing(patch: pytest.MonkeyPatch) -> None:
    """A decision for an unknown id is ignored."""
    judge = OpenStore._judge_decision

    def decided(self: OpenStore, change: Decide, taken: Any) -> Any:
        return None if self.find(change.transaction_id) is None else judge(self, change, taken)

    patch.setattr(OpenStore, "_judge_decision", decided)


def sends_what_was_rolled_back(patch: pytest.MonkeyPatch) -> None:
    """Rolled back transactions wait to be published."""

    def decided(self: OpenStore, stored: StoredTransaction, entry: Decided, now_ms: float) -> None:
        stored.verdict = Verdict.COMMIT
        self.queue.add(stored)

    patch.setattr(OpenStore, "_decide", decided)


def settles_nothing(patch: pytest.MonkeyPatch) -> None:
    """Published transactions are not recorded as settled."""
    patch.setattr(relay_runs.Run, "settle_later", lambda self, transaction_ids: None)


def trims_what_is_not_settled(patch: pytest.MonkeyPatch) -> None:
    """The done log is trimmed before the journal has its content."""
    patch.setattr(FileShard, "is_durable", lambda self: True)


def publishes_what_the_done_log_has(patch: pytest.MonkeyPatch) -> None:
    """A relay that takes over does not ask what its predecessor published."""
    patch.setattr(FileShard, "_taken_over", lambda self, names: None)


def publishes_again_what_was_in_doubt(patch: pytest.MonkeyPatch) -> None:
    """After a doubt the done log is not read."""
    learned = ShardBacklog.learned
    patch.setattr(
        ShardBacklog, "learned", lambda self, batch, found: learned(self, batch, DoneRead(found.end, frozenset()))
    )


def forgets_what_was_in_doubt(patch: pytest.MonkeyPatch) -> None:
    """Transactions of a doubt are not tried again."""

    def forget(self: FileShard, some: Sequence[Pending]) -> None:
        self.queue.forget(some)

    patch.setattr(FileShard, "_given_back", forget)


def lets_later_halves_pass(patch: pytest.MonkeyPatch) -> None:
    """With `order="half"` no half waits for earlier ones."""
    patch.setattr(queue.ReadyQueue, "_is_in_front", lambda self, pending: True)


def lets_others_pass_what_is_refused(patch: pytest.MonkeyPatch) -> None:
    """Among transactions that a topic refused, the last one goes first."""
    take = set_aside.SetAside.take
    patch.setattr(set_aside.SetAside, "take", lambda self, *args: take(self, *args)[::-1])


def tries_what_is_refused_no_more(patch: pytest.MonkeyPatch) -> None:
    """A set-aside transaction stays set aside."""
    patch.setattr(FileShard, "trial", lambda self, *_: None)


def run_state(seed: int) -> None:
    World(seed).run()


PLANTS: dict[Callable[[int], object], list[Plant]] = {
    run_state: [
        publishes_what_was_rolled_back,
        records_no_completion,
        reads_no_completion,
        obeys_other_groups_and_places,
        counts_every_answer,
    ],
    file_store_runs.run: [writes_every_answer_down, lets_strangers_decide],
    relay_runs.run: [
        accepts_decisions_on_nothing,
        sends_what_was_rolled_back,
        settles_nothing,
        trims_what_is_not_settled,
        publishes_what_the_done_log_has,
        publishes_again_what_was_in_doubt,
        forgets_what_was_in_doubt,
        lets_later_halves_pass,
        lets_others_pass_what_is_refused,
        tries_what_is_refused_no_more,
    ],
}


@pytest.mark.parametrize(
    ("run", "plant"),
    [pytest.param(run, plant, id=plant.__name__) for run, plants in PLANTS.items() for plant in plants],
)
def test_a_planted_defect_is_found(run: Callable[[int], object], plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)

    with silence(), pytest.raises(AssertionError):
        run_many(run)


def run_many(run: Callable[[int], object]) -> None:
    """Run the seeds until one fails."""
    for seed in range(SEEDS):
        run(seed)
