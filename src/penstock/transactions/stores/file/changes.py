"""Requests to an open file store: halves and decisions in, answered by callbacks or waited for."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue

from penstock.errors import (
    DecisionNotStoredError,
    HalfNotStoredError,
    StoppedError,
    TransactionError,
    TransactionRefusedError,
)
from penstock.transactions.store import DecidedCallback, PreparedCallback
from penstock.transactions.stores.file.log.journal import Change, Decide, Outcome, Prepare
from penstock.transactions.stores.file.open_store import OpenStore
from penstock.transactions.wire.half import Half


class Changes:
    """What producers, checks, the discard policy and operators change. Thread-safe.

    `opened` raises `StoppedError` where the store is not open. A decision that is waited for, and is not durable within
    `timeout_s`, counts as not stored.
    """

    def __init__(self, path: Path, opened: Callable[[], OpenStore], timeout_s: float) -> None:
        self._path = path
        self._opened = opened
        self._timeout_s = timeout_s

    def prepare(self, halves: Sequence[Half], callback: PreparedCallback) -> None:
        """Store the halves of one transaction, all or none, and call back once they are durable."""
        first, change = halves[0], Prepare(tuple(halves), int(time.time() * 1000))

        def changed(outcome: Outcome | Exception) -> None:
            why = outcome if isinstance(outcome, Exception) else outcome.refused
            if why is None:
                callback(change)
                return
            error = HalfNotStoredError(
                f"transaction {first.transaction_id} for {first.topic}: its half is not stored in {self._path}: {why}; "
                "the local transaction did not run, send it again"
            )
            error.__cause__ = why if isinstance(why, Exception) else None
            callback(error)

        self._submit(change, changed)

    def decide(self, decision: Decide, callback: DecidedCallback) -> None:
        """Store anybody's decision, or that a check was answered UNKNOWN, and call back once it is durable."""

        def changed(outcome: Outcome | Exception) -> None:
            if not isinstance(outcome, Exception):
                callback(_refusal(decision, outcome))
                return
            what = f"transaction {decision.transaction_id}: its {decision.verdict.name}"
            error = DecisionNotStoredError(f"{what} is not known to be stored in {self._path}: {outcome}")
            error.__cause__ = outcome
            callback(error)

        self._submit(decision, changed)

    def await_decision(self, decision: Decide) -> None:
        """Store a decision and return once it is durable, or raise what `decide` calls back with."""
        answers: SimpleQueue[TransactionError | None] = SimpleQueue()
        self.decide(decision, answers.put)
        try:
            error = answers.get(timeout=self._timeout_s)
        except Empty:
            raise DecisionNotStoredError(
                f"transaction {decision.transaction_id}: its {decision.verdict.name} was not stored in {self._path} "
                f"within {self._timeout_s:g} s"
            ) from None
        if error is not None:
            raise error

    def _submit(self, change: Change, changed: Callable[[Outcome | Exception], None]) -> None:
        try:
            writer = self._opened().writer
        except StoppedError as error:
            changed(error)
            return
        writer.submit(change, changed)


def _refusal(decision: Decide, outcome: Outcome) -> TransactionRefusedError | None:
    """Return what stands against a decision; one that says the same and came first does no harm."""
    if outcome.refused is None or outcome.stands is decision.verdict:
        return None
    what = f"transaction {decision.transaction_id}: its {decision.verdict.name}"
    return TransactionRefusedError(f"{what} was refused: {outcome.refused}")
