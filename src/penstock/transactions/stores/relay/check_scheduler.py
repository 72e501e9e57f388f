"""Checks of a store outside Kafka: who is asked about what is undecided, and what meets the discard policy."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from functools import partial

from penstock.errors import TransactionError
from penstock.transactions.core.discard import Exhausted
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
        for check in due:
            if check.check_count < self._terms.policy.maximum:
                asked.append(check)
            else:
                half, settle = partial(self._shards.half, check), partial(self._settle, check)
                exhausted = Exhausted(check.transaction_id, check.group, check.check_count, half, settle)
                self._terms.discarding.settle(exhausted)
        if asked:
            self._ask(asked)

    def _ask(self, asked: list[DueCheck]) -> None:
        counts, absent = self._shards.counts, self._shards.ask(asked)
        alone = Counter(check.group for check in asked if check.group in absent)
        counts.checks += len(asked) - alone.total()
        counts.no_producer += alone.total()
        for group, waiting in alone.items():
            if self._ration.is_due(group):
                _log.error(
                    "no producer of %s answers checks: %d transactions wait; start one with a check", group, waiting
                )

    def _settle(self, check: DueCheck, verdict: Verdict) -> None:
        self._decide(decision(check.transaction_id, check.group, verdict, Author.COORDINATOR), _log_failure)


def _log_failure(error: TransactionError | None) -> None:
    if error is not None:
        # It is due again in an interval.
        _log.warning("%s", error)
