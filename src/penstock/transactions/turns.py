"""Two transactional producers that take turns, and the thread that runs their Kafka transactions.

After a Kafka transaction has ended the broker writes its markers, and refuses the next begin of the same producer for
some milliseconds; the client library then waits a fixed 20 ms for each refusal. With two producers the markers of one
are written while the other works. The other begins only when the end of the first was answered: so what the log holds
is in order, and of two transactions only one can ever be in doubt. What was aborted is done again before anything
later. Then both are discarded and both initialised anew: neither can have an end on its way.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.errors import raised
from penstock.transactions.publisher import BATCH_BYTES, NotPublishedError, Publisher
from penstock.transactions.settlement import Share

#: Seconds that a Kafka transaction under way may take to end when the coordinator stops: its calls end sooner.
_LAST_S = 60.0
#: Seconds for which batches stay small after a batch was refused.
_SMALL_S = 60.0


@dataclass(frozen=True, slots=True)
class Landing:
    """How a Kafka transaction ended.

    Attributes:
        error: None where it was committed for certain; else what `Publisher.publish` raised.
        took_s: seconds from its begin to the answer of its end.
    """

    error: NotPublishedError | None
    took_s: float


class Turns:
    """Publishes one share after another, each by the next producer. Used by the coordinator's thread alone.

    Args:
        publishers: two, with transactional ids of their own.
        name: what the name of the thread ends with.
    """

    def __init__(self, publishers: Sequence[Publisher], name: str) -> None:
        self._publishers = publishers
        self._turn = 0
        # How large the batches are at most: a step of `BATCH_BYTES`; and when they may be large again.
        self._step = 0
        self._large_again = 0.0
        self._flying = False
        # Filled by the coordinator's thread, emptied by that of the producers; None ends it.
        self._work: queue.SimpleQueue[tuple[Publisher, Mapping[int, Share], Any] | None] = queue.SimpleQueue()
        # Whether the thread has handed the work on to the client library, or failed to.
        self._produced = threading.Event()
        # The other way round; an exception that nobody foresaw comes back as it is.
        self._landed: queue.SimpleQueue[Landing | BaseException] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=f"penstock-publisher-{name}", daemon=True)

    def open(self) -> None:
        """Make all producers and initialise them. The broker ends what former producers of their ids left open.

        Raises:
            ConfigurationError: the client library refused the settings.
            InDoubtError: the broker did not answer in time; try again.
        """
        if not self._thread.is_alive():
            self._thread.start()
        for publisher in self._publishers:
            if not publisher.is_open:
                publisher.open(BATCH_BYTES[self._step])

    def make_batches_smaller(self) -> bool:
        """Make batches smaller, for some time, and tell whether they could be.

        A broker refuses a batch as a whole, so what is refused in a smaller one is nearer to what is wrong. The
        producers are made anew, and must be opened again.
        """
        self._large_again = time.monotonic() + _SMALL_S
        if self._step + 1 == len(BATCH_BYTES):
            return False
        self._step += 1
        self.discard()
        return True

    def make_batches_large(self) -> None:
        """Make batches large again, when they were small for long enough."""
        if self._step and time.monotonic() >= self._large_again:
            self._step = 0
            self.discard()

    def discard(self) -> None:
        """Discard all producers with all they hold. None may be at work."""
        for publisher in self._publishers:
            publisher.close()

    def close(self) -> None:
        """Let the Kafka transaction under way end, and discard the producers."""
        if self._flying:
            self.land(_LAST_S)
        self._work.put(None)
        if not self._flying:
            self.discard()

    @property
    def is_open(self) -> bool:
        """Whether all producers are there to publish with."""
        return all(publisher.is_open for publisher in self._publishers)

    @property
    def flying(self) -> bool:
        """Whether a Kafka transaction is under way."""
        return self._flying

    def begin(self, shares: Mapping[int, Share], group_metadata: Any) -> None:
        """Settle what the partitions' shares hold in one Kafka transaction; its end is told by `land`.

        What is decided in the shares must not change until then. No other may be under way. It returns when all is in
        the client library's hands: each record handed over lets go of the interpreter, and beside a thread that reads
        it takes five milliseconds to get it back. A group of 500 took most of a second so.
        """
        publisher = self._publishers[self._turn]
        self._turn = (self._turn + 1) % len(self._publishers)
        self._flying = True
        self._produced.clear()
        self._work.put((publisher, shares, group_metadata))
        self._produced.wait()

    def land(self, timeout_s: float = 0.0) -> Landing | None:
        """Return how the Kafka transaction under way ended, or None while it is not known yet.

        Raises:
            Exception: what nobody foresaw: a mistake of penstock's.
        """
        try:
            landed = self._landed.get(timeout=timeout_s) if timeout_s else self._landed.get_nowait()
        except queue.Empty:
            return None
        self._flying = False
        if isinstance(landed, BaseException):
            raise landed
        return landed

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            publisher, shares, group_metadata = work
            begun = time.monotonic()
            error: NotPublishedError | None = None
            try:
                publisher.publish(shares, group_metadata, self._produced.set)
            except NotPublishedError as known:
                error = known
            except:  # noqa: E722 - see `raised`; raised again by the coordinator's thread
                self._landed.put(raised())
                continue
            finally:
                self._produced.set()
            self._landed.put(Landing(error, time.monotonic() - begun))


__all__ = ["Landing", "Turns"]
