"""The airline service, a process of its own: sends its flights in transactions and answers their checks.

    python examples/demo airline BOOTSTRAP_SERVERS TOPIC FOLDER NUMBER [STAND_AT]

Each flight is one transaction, whose local part is a row in the `flights` table. Sender threads share the aircraft
among them; a cancelled flight leaves no row, so the last ones before a kill may be sent, and rolled back, once more.
Reports `progress`, and `standing` at the flight at which it is to be killed. Ends at SIGTERM.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from uuid import uuid4

from demo.book import FlightBook, RefusedError
from demo.children import Reporter
from demo.flights import Flight, read_schedule
from demo.schedule import SENDERS, Share, left_unknown, share_of
from penstock import App
from penstock.errors import DecisionNotStoredError, HalfNotStoredError, TransactionError
from penstock.message import Message
from penstock.transactions import HalfMessage, TransactionalProducer, TransactionState

GROUP = "airline"

#: Sender threads of one process. A transaction waits for two acknowledgements, during which others go on.
_THREADS = 16

#: How often a flight is sent again before its sender gives up.
_ATTEMPTS = 10

#: Seconds between two looks of a sender whose aircraft all wait.
_HELD_LOOK_S = 0.02

_REPORT_S = 0.2

#: Seconds to wait for the SIGKILL of the parent, which comes at the next report.
_KILLED_WITHIN_S = 60.0


class Airline:
    """One sending process: a producer, a table, and threads that each work off a share of the schedule.

    It stops at the flight `stand_at`, if there is one, between local commit and decision.
    """

    def __init__(
        self,
        bootstrap_servers: str,
        topic: str,
        flights: Iterable[Flight],
        *,
        stand_at: int | None,
        reporter: Reporter,
        book: FlightBook,
    ) -> None:
        self._topic = topic
        self._flights = list(flights)
        self._stand_at = stand_at
        self._reporter = reporter
        self._book = book
        self._failure: BaseException | None = None
        #: Grows by the handler of the follower; looking up a number in a set is one step.
        self._published: set[int] = set()
        # In a group of its own, so that a sender that is restarted reads the topic from its beginning.
        follower = App(f"airline-{uuid4().hex}", bootstrap_servers=bootstrap_servers, workers=1, report=False)
        follower.handler(topic, order="none")(self._follow)
        self._follower = follower
        self._producer = TransactionalProducer(GROUP, bootstrap_servers=bootstrap_servers, check=self._check)

    def run(self) -> None:
        """Send what the table does not hold yet, and answer checks until the parent wants the end or a thread fails."""
        recorded = self._book.last_recorded()
        coming: list[list[Flight]] = [[] for _ in range(_THREADS)]
        for flight in self._flights:
            coming[share_of(flight, SENDERS * _THREADS) // SENDERS].append(flight)
        shares = [Share(flights, self._published, recorded) for flights in coming]
        threads = [
            threading.Thread(target=self._work_off, args=(share,), name=f"penstock-demo-sender-{number}", daemon=True)
            for number, share in enumerate(shares)
        ]
        with self._producer, self._follower.start() as following:
            for thread in threads:
                thread.start()
            while not (self._reporter.ending.wait(_REPORT_S) or self._failure or following.wait(0)):
                left = sum(share.left for share in shares)
                self._reporter.report(
                    "progress",
                    sent=len(self._flights) - left,
                    held=sum(share.held for share in shares),
                    finished=not any(thread.is_alive() for thread in threads),
                )
            self._reporter.ending.set()
            for thread in threads:
                thread.join()
        if self._failure is not None:
            raise self._failure

    def _follow(self, message: Message) -> None:
        self._published.add(Flight.from_json(message.value or b"").sequence)

    def _work_off(self, share: Share) -> None:
        try:
            while share.left and not self._reporter.ending.is_set():
                flight = share.take()
                if flight is None:
                    self._reporter.ending.wait(_HELD_LOOK_S)
                elif not self._send(flight) and flight.departed:
                    share.hold(flight)
        except BaseException as error:  # noqa: BLE001 - raised by the main thread
            self._fail(error)

    def _send(self, flight: Flight) -> bool:
        """Send one flight in a transaction, or another one where that came to nothing; tell whether it is decided."""
        for _ in range(_ATTEMPTS):
            try:
                return self._send_once(flight)
            except (HalfNotStoredError, RefusedError):
                continue
            except DecisionNotStoredError:
                return False
        raise TransactionError(
            f"flight {flight.sequence} could not be sent to {self._topic} in {_ATTEMPTS} transactions; "
            "look at the broker's log"
        )

    def _send_once(self, flight: Flight) -> bool:
        with self._producer.transaction(self._topic, key=flight.key, value=flight.to_json()) as tx:
            self._book.record(flight, tx.transaction_id)
            if flight.sequence == self._stand_at:
                self._stand_still(flight, tx.transaction_id)
            if left_unknown(flight):
                tx.unknown()
            elif not flight.departed:
                tx.rollback()
        return not left_unknown(flight)

    def _stand_still(self, flight: Flight, transaction_id: str) -> None:
        """Wait, between local commit and decision, for the SIGKILL of the parent."""
        self._reporter.report("standing", sequence=flight.sequence, transaction_id=transaction_id)
        self._reporter.ending.wait(_KILLED_WITHIN_S)
        raise HalfNotStoredError(
            f"transaction {transaction_id} was to be interrupted by a SIGKILL that never came; run the demo again"
        )

    def _check(self, half: HalfMessage) -> TransactionState:
        departed = self._book.answer(half.transaction_id)
        return TransactionState.COMMIT if departed else TransactionState.ROLLBACK

    def _fail(self, error: BaseException) -> None:
        if self._failure is None:
            self._failure = error


def main(arguments: Sequence[str]) -> int:
    """Run a sending process until the parent wants the end."""
    bootstrap_servers, topic, folder, number, *stand_at = arguments
    reporter = Reporter()
    flights = (flight for flight in read_schedule(Path(folder)) if share_of(flight, SENDERS) == int(number))
    with FlightBook(Path(folder)) as book:
        stands = int(stand_at[0]) if stand_at else None
        Airline(bootstrap_servers, topic, flights, stand_at=stands, reporter=reporter, book=book).run()
    return 0
