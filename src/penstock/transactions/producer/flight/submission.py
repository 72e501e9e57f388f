"""A transaction without a local part on its way: what `submit` returns."""

from __future__ import annotations

from penstock.errors import PenstockError
from penstock.transactions.model import TransactionResult, TransactionState
from penstock.transactions.producer.flight.flight import Flight

_COMMIT = TransactionState.COMMIT


class Submission(Flight):
    """A message that commits as soon as its half is stored; the result is there when what it waits for has come."""

    __slots__ = ()

    @property
    def transaction_id(self) -> str:
        """The id of the transaction."""
        return self.halves[0].transaction_id

    def submit(self) -> None:
        """Send it off; raises as `Flight.start` does."""
        self.start(Submission._commit, commits=True)

    def try_submit(self) -> None:
        """Send it off, or end with the error that `submit` would raise."""
        try:
            self.submit()
        except PenstockError as error:
            self.fail(error)

    def _outcome(self) -> TransactionResult:
        half = self.halves[0]
        return TransactionResult(half.transaction_id, _COMMIT, half.topic)

    # Functions of a flight, as its callbacks are: without a bound method it holds nothing that holds it.

    @staticmethod
    def _commit(flight: Flight) -> None:
        if flight.error is not None:
            flight._end()  # noqa: SLF001 - it is a submission
        else:
            flight.end(_COMMIT, Flight._end)  # noqa: SLF001 - the same
