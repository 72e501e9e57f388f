"""Deadlines of the requests of one producer: for a store's answer, and for a publication to be seen.

One thread looks at the time and gives up what took too long; what is still waited for at a stop is given up, too. What
that means for a transaction, and whose callback comes, is the flight's own. An error for a publication says what it
waits for: the store is asked that on another thread, so that no other deadline waits for the answer.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence
from typing import Protocol

from penstock.clients.asking import ask_again

_LOOK_S = 0.1
_STOP_POLL_S = 0.005
_JOIN_S = 5.0


class Awaited(Protocol):
    """A flight, as far as it is waited for. It may already be complete: giving it up is a no-op then."""

    def give_up(self, cause: str) -> None:
        """Wait no longer for the store's answer."""

    def give_up_publication(self, cause: str) -> None:
        """Wait no longer until the message is visible."""


class RequestDeadlines:
    """Who waits, and until when. Thread-safe.

    An answer is waited for `answer_timeout_s` seconds, infinite where the store keeps the time itself, and a
    publication `publish_timeout_s`, from its stored decision on.
    """

    def __init__(self, name: str, answer_timeout_s: float, publish_timeout_s: float) -> None:
        self._answer_timeout_s = answer_timeout_s
        #: Whether an answer may come too late.
        self.has_limit = answer_timeout_s < math.inf
        self._publish_timeout_s = publish_timeout_s
        # Both are changed by flights, in any thread: steps on a dict are single ones, and it keeps their order.
        #: Flights that the store owes an answer, and until when; not those whose block runs.
        self.awaiting_answer: dict[Awaited, float] = {}
        #: Flights whose decision is stored and whose publication is waited for, and until when. Who takes one out tells
        #: its owner.
        self.awaiting_publication: dict[Awaited, float] = {}
        # Set by drain(), before it looks at what is owed; read by flights, after they are among those.
        self.stopping = False
        self._ending = threading.Event()
        self._name = name
        self._thread = threading.Thread(target=self._run, name=f"penstock-deadlines-{name}", daemon=True)
        # Gives up publications. Made by the thread above, one at a time.
        self._diagnosis: threading.Thread | None = None

    def start(self) -> None:
        """Begin to look at the time."""
        self._thread.start()

    def await_answer(self, flight: Awaited) -> None:
        """Wait for the store's answer from now on."""
        self.awaiting_answer[flight] = time.monotonic() + self._answer_timeout_s

    def await_publication(self, flight: Awaited) -> None:
        """Wait for the publication from now on."""
        self.awaiting_publication[flight] = time.monotonic() + self._publish_timeout_s

    def drain(self, timeout_s: float) -> None:
        """Have new flights refused, and wait until the store owes no answer, at most `timeout_s` seconds."""
        self.stopping = True
        ask_again(lambda: not self.awaiting_answer, timeout_s, _STOP_POLL_S)

    def stop(self) -> None:
        """Give up whatever is still waited for. The store is stopped: nobody else may tell of it."""
        self._ending.set()
        if self._thread.is_alive() and self._thread is not threading.current_thread():
            self._thread.join(_JOIN_S)
        for flight in list(self.awaiting_answer):
            flight.give_up("the producer was stopped before the store had answered")
        for flight in list(self.awaiting_publication):
            flight.give_up_publication("the producer was stopped before it was seen to be visible")

    def _run(self) -> None:
        while not self._ending.wait(_LOOK_S):
            now = time.monotonic()
            # Copies, made in one step each; a list of the items is not, for the collector may run at any tuple of it.
            for flight, until in self.awaiting_answer.copy().items():
                if until <= now:
                    flight.give_up(f"the store did not answer within {self._answer_timeout_s:g} s")
            late = [flight for flight, until in self.awaiting_publication.copy().items() if until <= now]
            if late and (self._diagnosis is None or not self._diagnosis.is_alive()):
                name = f"penstock-late-{self._name}"
                self._diagnosis = threading.Thread(target=self._give_up, args=(late,), name=name, daemon=True)
                self._diagnosis.start()

    def _give_up(self, late: Sequence[Awaited]) -> None:
        for flight in late:
            flight.give_up_publication(f"was not seen to be visible within {self._publish_timeout_s:g} s")
