"""`penstock tx --file`: a look into a store in a folder. It needs neither Kafka nor the store's lock.

The folder belongs to the process that has the store open: whatever changes something is done there.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

import typer

from penstock.errors import BrokerConnectionError, ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.options import ClientConfig
    from penstock.transactions.model import DiscardedTransaction, PendingTransaction
    from penstock.transactions.operator.audit import Audited
    from penstock.transactions.wire.ops import Verdict


@dataclass(frozen=True, slots=True)
class FileOperator:
    """What `penstock tx` does on a file store: it looks."""

    folder: Path
    #: Kafka's addresses, where the audit log of the store's prefix is; None: it is not looked at.
    bootstrap_servers: str | None
    prefix: str
    config: ClientConfig

    def pending(self) -> Sequence[PendingTransaction]:
        """Return what is not settled, oldest first. Raises as `reader.read_pending`."""
        from penstock.transactions.stores.file.administration import read_pending

        return read_pending(self.folder)

    def show(self, transaction_id: str) -> PendingTransaction | None:
        """Return one pending transaction, or None."""
        from penstock.transactions.stores.file.administration import read_pending

        return next(iter(read_pending(self.folder, transaction_id)), None)

    def discarded(self) -> Sequence[DiscardedTransaction]:
        """Return nothing: what was discarded lies in Kafka, in the topic of the store's prefix."""
        return ()

    def acts(self, transaction_id: str) -> Sequence[Audited]:
        """Return what operators did to a transaction, oldest first, where it is known which Kafka has that."""
        if self.bootstrap_servers is None:
            return ()
        from penstock.transactions.operator.audit import read_audit
        from penstock.transactions.operator.inspection import Inspection
        from penstock.transactions.wire.topics import StoreTopics

        topics = StoreTopics(self.prefix)
        try:
            return read_audit(Inspection(self.bootstrap_servers, self.config, topics), topics.audit, transaction_id)
        except BrokerConnectionError as error:
            # The store itself needs no Kafka to be looked at.
            typer.echo(f"what operators did is not shown: {error}", err=True)
            return ()

    def decide(self, transaction_id: str, verdict: Verdict, *_others: object) -> NoReturn:
        """Refuse, and say what to do."""
        self._refuse(f"decide({transaction_id!r}, Verdict.{verdict.name}, actor)")

    def resume(self, transaction_id: str, *_others: object) -> NoReturn:
        """Refuse, and say what to do."""
        self._refuse(f"resume({transaction_id!r}, actor)")

    def _refuse(self, call: str) -> NoReturn:
        raise ConfigurationError(
            f"the file store in {self.folder} is changed by the process that has it, and from here only looked at: "
            f"call store.administration().{call} there"
        )
