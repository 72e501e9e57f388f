"""Many simulated runs of handlers that publish, at least once and exactly once, judged by what readers may see.

One seed alone: PENSTOCK_SIMULATION_SEED=<seed>.
"""

# ruff: noqa: ARG005 - what is planted takes the arguments of what it replaces

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from confluent_kafka import KafkaException

from penstock.clients.transactional.end_watch import EndWatch
from penstock.consumer.polling.committing.transactional_commits import TransactionalCommits
from penstock.consumer.publishing.result_publisher import ResultPublisher, Unpublished
from penstock.consumer.publishing.transaction import Transaction
from penstock.consumer.publishing.transaction_runner import TransactionRunner
from penstock.consumer.publishing.transactional_publisher import TransactionalPublisher
from simulation.invariant_checker import InvariantBroken
from simulation.publishing_varied import TRANSACTION_FAULTS, run
from simulation.varied import ONE_SEED, RUNS, silence

CHUNK = 100
#: Of each kind: a part of the runs that `make simulate` asks for.
_RUNS = max(1, RUNS // 3)
#: In how many seeds a planted defect must show.
SEEDS = 300

CHUNKS = [(int(ONE_SEED), 1)] if ONE_SEED else [(begin, min(CHUNK, _RUNS - begin)) for begin in range(0, _RUNS, CHUNK)]

Plant = Callable[[pytest.MonkeyPatch], None]


@pytest.mark.parametrize("exactly_once", [False, True], ids=["at least once", "exactly once"])
@pytest.mark.parametrize(("first", "count"), CHUNKS)
def test_readers_see_what_they_may_for_each_seed(first: int, count: int, *, exactly_once: bool) -> None:
    seen = 0
    with silence():
        for seed in range(first, first + count):
            seen += run(seed, exactly_once=exactly_once).results.seen

    assert seen >= count


def test_a_run_is_the_same_again() -> None:
    with silence():
        first, again = (run(7, exactly_once=True) for _ in range(2))

    assert first.trace == again.trace
    assert first.met == again.met
    assert first.broker.commit_log("sim") == again.broker.commit_log("sim")


def test_every_fault_of_a_transaction_happens() -> None:
    happened: Counter[tuple[str, str]] = Counter()
    met: Counter[str] = Counter()
    wanted = {(call, effect.value) for call, effect, _, _ in TRANSACTION_FAULTS.values()}
    wanted |= {("transaction", "timed out"), ("produce", "too large"), ("produce", "forbidden")}
    everything = {
        "transactions",
        "a writer",
        "a writer apart",
        "a doubt is settled",
        "left behind",
        "frozen in a transaction",
        "killed in a transaction",
        "unstable offsets",
        "no member",
    }
    with silence():
        # The rarest come once in fifty runs.
        for seed in range(600):
            if seed > 50 and wanted <= happened.keys() and everything <= met.keys():
                break
            simulation = run(seed, exactly_once=True)
            happened.update(simulation.transactions.happened)
            met.update(simulation.met)

    assert {one for one in wanted if not happened[one]} == set()
    assert {one for one in everything if not met[one]} == set()


def test_every_fault_of_a_producer_happens() -> None:
    happened: Counter[str] = Counter()
    with silence():
        for seed in range(60):
            simulation = run(seed, exactly_once=False)
            happened.update({one.value: count for one, count in simulation.broker.faults.happened.items()})
            happened["refused"] += len(simulation.results.refused)
            happened["for ever"] += simulation.trace.count("a producer fails for ever")

    assert {one for one in ("produce", "queue", "commit_async", "refused", "for ever") if not happened[one]} == set()


# Planted defects, exactly once


def commits_offsets_of_results_that_are_missing(patch: pytest.MonkeyPatch) -> None:
    """The offsets of messages are committed whose results are not in the transaction."""
    produce = TransactionRunner._run

    def without_one(self: TransactionRunner, transaction: Transaction, metadata: Any) -> None:
        kept, transaction.inside = transaction.inside, transaction.inside[:-1]
        try:
            produce(self, transaction, metadata)
        finally:
            transaction.inside = kept

    patch.setattr(TransactionRunner, "_run", without_one)


def commits_offsets_before_their_results(patch: pytest.MonkeyPatch) -> None:
    """A message is done when its results are handed over, so that any transaction may commit its offset."""
    submit, complete_now = TransactionalPublisher.submit, Unpublished.complete

    def complete(self: TransactionalPublisher, lane: Any, items: Any, results: Any, tries: Any = None) -> None:
        submit(self, lane, items, results, tries)
        complete_now(Unpublished(lane, items, results, tries))

    patch.setattr(TransactionalPublisher, "submit", complete)
    patch.setattr(Unpublished, "complete", lambda self: None)


class _Repeated(Unpublished):
    """Results whose messages are done already."""

    def complete(self) -> None:
        """Nothing."""


def publishes_a_result_twice(patch: pytest.MonkeyPatch) -> None:
    """What was committed is now and then written again."""
    note, chance = TransactionalPublisher._note_committed, random.Random(1)  # noqa: S311 - the same defect each time

    def once_more(self: TransactionalPublisher, transaction: Transaction) -> None:
        note(self, transaction)
        if transaction.inside and chance.random() < 0.1:
            one = transaction.inside[0]
            self._queue.append(_Repeated(one.lane, one.items, one.results, one.tries))

    patch.setattr(TransactionalPublisher, "_note_committed", once_more)


def takes_a_doubt_for_aborted(patch: pytest.MonkeyPatch) -> None:
    """A transaction that nobody knows the end of is done again."""
    patch.setattr(TransactionalPublisher, "_settle", lambda self: setattr(self, "_doubt", None))


def takes_a_doubt_for_committed(patch: pytest.MonkeyPatch) -> None:
    """A transaction that nobody knows the end of is done with."""

    def settle(self: TransactionalPublisher) -> None:
        doubt, self._doubt = self._doubt, None
        if doubt is not None:
            self._note_committed(doubt)

    patch.setattr(TransactionalPublisher, "_settle", settle)


def drops_what_was_aborted(patch: pytest.MonkeyPatch) -> None:
    """The results of a transaction that was aborted are forgotten, and their messages done."""
    note = TransactionalPublisher._note_failed

    def forget(self: TransactionalPublisher, transaction: Transaction | None, error: BaseException) -> None:
        note(self, transaction, error)
        if transaction is not None and self._doubt is None and isinstance(error, KafkaException):
            inside, self._inside = self._inside, []
            for one in inside:
                one.complete()

    patch.setattr(TransactionalPublisher, "_note_failed", forget)


def swaps_what_is_done_again(patch: pytest.MonkeyPatch) -> None:
    """What is done again is written in another order."""
    note = TransactionalPublisher._note_failed

    def swap(self: TransactionalPublisher, transaction: Transaction | None, error: BaseException) -> None:
        note(self, transaction, error)
        self._inside = self._inside[::-1]

    patch.setattr(TransactionalPublisher, "_note_failed", swap)


def believes_every_end(patch: pytest.MonkeyPatch) -> None:
    """An end that was sent twice passes for known."""
    patch.setattr(EndWatch, "doubt", lambda self, took_s: None)


def commits_as_nobody(patch: pytest.MonkeyPatch) -> None:
    """A member that was put out commits without an id: a zombie's results become visible."""
    patch.setattr(
        TransactionalCommits,
        "note_rebalanced",
        lambda self, client: self._publisher.set_metadata(client.consumer_group_metadata()),
    )


EXACTLY_ONCE: dict[Plant, str] = {
    commits_offsets_of_results_that_are_missing: "I3",
    commits_offsets_before_their_results: "I3|I4|E",
    publishes_a_result_twice: "E1",
    takes_a_doubt_for_aborted: "E1|I3",
    takes_a_doubt_for_committed: "I3|I4|I2|not done|E",
    drops_what_was_aborted: "I3|I4|not done",
    swaps_what_is_done_again: "E5",
    believes_every_end: "E2|E3|E1|I3",
    commits_as_nobody: "E1|I3",
}


# Planted defects, at least once


def is_done_before_its_results(patch: pytest.MonkeyPatch) -> None:
    """A message is done when its results were sent."""
    send = ResultPublisher._send

    def sent(self: ResultPublisher, producer: Any, number: int, one: Unpublished, result: Any) -> bool:
        taken = send(self, producer, number, one, result)
        if taken and one in self._sent and one.left and one.sent == len(one.results):
            one.complete()
            one.items = ()
        return taken

    patch.setattr(ResultPublisher, "_send", sent)


def forgets_a_refusal(patch: pytest.MonkeyPatch) -> None:
    """What a broker refused is done."""
    patch.setattr(Unpublished, "refuse", lambda self, error, wake: self.complete())


def sends_the_newest_first(patch: pytest.MonkeyPatch) -> None:
    """Results are not sent in the order in which they were handed over."""

    def submit(self: ResultPublisher, lane: Any, items: Any, results: Any, tries: Any = None) -> None:
        self.is_used = True
        self._queue.appendleft(Unpublished(lane, items, results, tries))

    patch.setattr(ResultPublisher, "submit", submit)


AT_LEAST_ONCE: dict[Plant, str] = {
    is_done_before_its_results: "I3|I4|not done",
    forgets_a_refusal: "I3|not done",
    sends_the_newest_first: "E5",
}


def run_all(*, exactly_once: bool) -> None:
    """Run the seeds until one fails."""
    for seed in range(SEEDS):
        run(seed, exactly_once=exactly_once)


@pytest.mark.parametrize(
    ("plant", "exactly_once"),
    [*((one, True) for one in EXACTLY_ONCE), *((one, False) for one in AT_LEAST_ONCE)],
    ids=lambda one: getattr(one, "__name__", ""),
)
def test_a_planted_defect_is_found(plant: Plant, exactly_once: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch)
    what = (EXACTLY_ONCE | AT_LEAST_ONCE)[plant]

    with silence(), pytest.raises(InvariantBroken, match=rf"^[^\n]*({what})") as found:
        run_all(exactly_once=exactly_once)

    assert any("PENSTOCK_SIMULATION_SEED=" in note for note in found.value.__notes__)
