"""A transaction without a local part on its way: what `submit` returns."""

from __future__ import annotations

from penstock.transactions.model import TransactionResult, TransactionState
from penstock.transactions.producer.flight import Flight
from penstock.transactions.producer.futures import ResultFuture

_COMMIT = TransactionState.COMMIT


class Submission(ResultFuture[TransactionResult]):
    """A message that commits as soon as its half is stored; the result is there when what it waits for has come."""

    __slots__ = ("_flight",)

    def __init__(self, flight: Flight) -> None:
        super().__init__()
        self._flight = flight

    @property
    def transaction_id(self) -> str:
        """The id of the transaction."""
        return self._flight.halves[0].transaction_id

    def start(self) -> None:
        """Send it off; raises as `Flight.start` does."""
        self._flight.start(self._prepared, commits=True)

    def _prepared(self, flight: Flight) -> None:
        if flight.error is not None:
            self.fail(flight.error)
        else:
            flight.end(_COMMIT, self._ended)

    def _ended(self, flight: Flight) -> None:
        if flight.error is not None:
            self.fail(flight.error)
        else:
            half = flight.halves[0]
            self.succeed(TransactionResult(half.transaction_id, _COMMIT, half.topic))
