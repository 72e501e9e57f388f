"""`penstock tx --file`: a look into a store in a folder. It needs neither Kafka nor the store's lock.

The folder belongs to the process that has the store open: whatever changes something is done there.
"""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, NoReturn, Self

from penstock.errors import ConfigurationError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.transactions.model import PendingTransaction
    from penstock.transactions.records import Verdict


class FileHands:
    """What `penstock tx` does on a file store: it looks. Used as a context manager, like its siblings.

    Args:
        folder: the store's folder, as `FileStore` has it.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        pass

    def pending(self) -> Sequence[PendingTransaction]:
        """Return what is not settled, oldest first. Raises as `looking.look`."""
        from penstock.transactions.file.looking import look

        return look(self._folder)

    def show(self, transaction_id: str) -> PendingTransaction | None:
        """Return one pending transaction, or None."""
        return next((one for one in self.pending() if one.transaction_id == transaction_id), None)

    def decide(
        self,
        transaction_id: str,
        verdict: Verdict,
        actor: str,  # noqa: ARG002 - what the others are called with
        why: str,  # noqa: ARG002 - the same
        timeout_s: float,  # noqa: ARG002 - the same
    ) -> NoReturn:
        """Refuse, and say what to do."""
        self._refuse(f"decide({transaction_id!r}, Verdict.{verdict.name}, actor)")

    def resume(self, transaction_id: str, actor: str, why: str) -> NoReturn:  # noqa: ARG002 - as `decide`
        """Refuse, and say what to do."""
        self._refuse(f"resume({transaction_id!r}, actor)")

    def _refuse(self, call: str) -> NoReturn:
        raise ConfigurationError(
            f"the file store in {self._folder} is changed by the process that has it, and from here only looked at: "
            f"call store.administration().{call} there"
        )


__all__ = ["FileHands"]
