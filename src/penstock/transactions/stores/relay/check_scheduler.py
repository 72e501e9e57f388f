"""Checks of a store outside Kafka: who is asked about what is undecided, and what meets the discard policy."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from functools import partial

from penstock.errors import TransactionError
from penstock.transactions.coordinator.checks.discard_policy import Exhausted
from penstock.transactions.rationed_log import RationedLog
from penstock.transactions.store import DecidedCallback
from penstock.transactions.stores.relay.changes import Decide
from penstock.transactions.stores.relay.shards import CheckTerms, DueCheck, StoreShards
from penstock.transactions.stores.relay.store import decision
from penstock.transactions.wire.ops import Author, Verdict

_log = logging.getLogger("penstock.transactions")


class CheckScheduler:
    """Sends checks, and hands over to the discard policy. Used by the coordinator's thread.

    `decide` has a decision stored.
    """

    def __init__(
        self, shards: StoreShards, terms: CheckTerms, decide: Callable[[Decide, DecidedCallback], None]
    ) -> None:
        self._shards = shards
        self._terms = terms
        self._decide = decide
        self._ration = RationedLog()

    def round(self) -> None:
        """Send the checks that are due, and hand over what is exhausted."""
        due = self._shards.due()
        asked: list[DueCheck] = []
        for one in due:
            if one.check_count < self._terms.policy.maximum:
                asked.append(one)
            else:
                half, decide = partial(self._shards.half, one), partial(self._settle, one)
                self._terms.discarding.settle(Exhausted(one.transaction_id, one.group, one.check_count, half, decide))
        if asked:
            self._ask(asked)

    def _ask(self, asked: list[DueCheck]) -> None:
        counts, absent = self._shards.counts, self._shards.ask(asked)
        alone = Counter(one.group for one in asked if one.group in absent)
        counts.checks += len(asked) - alone.total()
        counts.no_producer += alone.total()
        for group, waiting in alone.items():
            text = "no producer of %s answers checks: %d transactions wait; start one with a check"
            self._ration.warn(f"no producer of {group}", text, group, waiting)

    def _settle(self, one: DueCheck, verdict: Verdict) -> None:
        self._decide(decision(one.transaction_id, one.group, verdict, Author.COORDINATOR), _log_failure)


def _log_failure(error: TransactionError | None) -> None:
    if error is not None:
        # It is due again in an interval.
        _log.warning("%s", error)
