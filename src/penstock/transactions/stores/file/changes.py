"""Requests to an open file store: halves and decisions in, answered by callbacks or waited for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

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


@dataclass(frozen=True, slots=True)
class PreparedHalves:
    """The halves of one transaction, stored in the file store."""

    halves: Sequence[Half]


class Changes:
    """What producers, checks, the discard policy and operators change. Thread-safe.

    Args:
        path: the store's folder, for messages.
        opened: returns the open store, or raises `StoppedError`.
        timeout_s: seconds after which a decision that is waited for, and is not durable, counts as not stored.
    """

    def __init__(self, path: Path, opened: Callable[[], OpenStore], timeout_s: float) -> None:
        self._path = path
        self._opened = opened
        self._timeout_s = timeout_s

    def prepare(self, halves: Sequence[Half], callback: PreparedCallback) -> None:
        """Store the halves of one transaction, all or none, and call back once they are durable."""
        first = halves[0]

        def changed(outcome: Outcome | Exception) -> None:
            why = outcome if isinstance(outcome, Exception) else outcome.refused
            if why is None:
                callback(PreparedHalves(halves))
                return
            error = HalfNotStoredError(
                f"transaction {first.transaction_id} for {first.topic}: its half is not stored in {self._path}: {why}; "
                "the local transaction did not run, send it again"
            )
            error.__cause__ = why if isinstance(why, Exception) else None
            callback(error)

        self._submit(Prepare(tuple(halves), int(time.time() * 1000)), changed)

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
        """Store a decision and return once it is durable.

        Raises:
            TransactionRefusedError: another one stands.
            DecisionNotStoredError: it is not known to be durable.
        """
        answers: list[TransactionError | None] = []
        done = threading.Event()

        def completed(error: TransactionError | None) -> None:
            answers.append(error)
            done.set()

        self.decide(decision, completed)
        if not done.wait(self._timeout_s):
            raise DecisionNotStoredError(
                f"transaction {decision.transaction_id}: its {decision.verdict.name} was not stored in {self._path} "
                f"within {self._timeout_s:g} s"
            )
        if answers[0] is not None:
            raise answers[0]

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
