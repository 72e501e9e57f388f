"""The gate before a sink's function: a stop closes it, so that the batch under way is finished and no other begun.

Spark's own stop interrupts a batch in its middle. Behind a closed gate the next batch waits in the JVM until Spark's
stop wakes it there; it was never begun, so Spark hands it over at the next start.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

#: Milliseconds of one wait of a batch that is not begun, and how many there are at most.
_PARK_MS, _PARKS = 1_000, 600

#: Waits after Spark was told to stop, for a JVM whose waits are not woken by it.
_PARKS_WHEN_LEAVING = 3


class BatchLeftError(Exception):
    """Ends a query that is being stopped, at a batch which the next start does.

    Spark tells a stop from a failure by the words of an interrupted call, and its search overflows the stack of the
    JVM's thread where much text follows them (seen with 4.3.0: `StreamExecution`, PROXY_ERROR). So they stand here, at
    the end, and the text is short.
    """

    def __init__(self, batch_id: int) -> None:
        super().__init__(
            f"batch {batch_id} is left to the next start. py4j.protocol.Py4JJavaError: An error occurred while "
            "calling Thread.sleep: java.lang.InterruptedException"
        )


class Gate:
    """Calls a sink's function with each batch until it is closed. One for each start of a query.

    Spark's thread calls it; the other methods may be called from any thread. `park` waits some milliseconds on the
    thread of the batch, and is woken by Spark's stop with any exception.
    """

    def __init__(
        self,
        function: Callable[[DataFrame, int], None],
        park: Callable[[DataFrame, int], None] | None = None,
    ) -> None:
        self._function = function
        self._park = park or sleep_in_jvm
        # Guards that no batch begins once `close` has returned, and the two numbers.
        self._lock = threading.Lock()
        self._closed = False
        self._leaving = False
        self._under_way: int | None = None
        self._done: int | None = None
        self._committed: int | None = None
        self._failure: BaseException | None = None

    def __call__(self, batch: DataFrame, batch_id: int) -> None:
        """Let the function have a batch, or keep the batch waiting behind a closed gate."""
        with self._lock:
            # Spark plans a batch when it has committed the one before.
            self._committed = self._done
            closed = self._closed
            if not closed:
                self._under_way = batch_id
        if closed:
            self._wait_for_the_end(batch, batch_id)
        try:
            self._function(batch, batch_id)
        except Exception as error:
            with self._lock:
                self._failure = error
            if self._leaving:
                # A job that Spark's stop cancelled under the function: its text is long, see BatchLeftError.
                raise BatchLeftError(batch_id) from None
            raise
        else:
            with self._lock:
                self._done = batch_id
        finally:
            with self._lock:
                self._under_way = None

    def _wait_for_the_end(self, batch: DataFrame, batch_id: int) -> None:
        left = _PARKS
        while left:
            left = min(left, _PARKS_WHEN_LEAVING) - 1 if self._leaving else left - 1
            try:
                self._park(batch, _PARK_MS)
            except Exception:  # noqa: BLE001 - however the stop shows, the batch is left
                break
        raise BatchLeftError(batch_id)

    def close(self) -> None:
        """Let no further batch begin."""
        with self._lock:
            self._closed = True

    def leave(self) -> None:
        """Close it, and take what ends a batch from now on for the stop's doing."""
        self.close()
        self._leaving = True

    @property
    def under_way(self) -> int | None:
        """The batch that the function has."""
        with self._lock:
            return self._under_way

    @property
    def done(self) -> int | None:
        """The last batch that the function returned from; whether Spark has committed it shows in its progress."""
        with self._lock:
            return self._done

    @property
    def committed(self) -> int | None:
        """The last batch that is known to be committed, because another was handed over after it."""
        with self._lock:
            return self._committed

    @property
    def failure(self) -> BaseException | None:
        """What the function raised, as it was, of which Spark keeps the text only."""
        with self._lock:
            return self._failure


def sleep_in_jvm(batch: DataFrame, milliseconds: int) -> None:
    """Wait on the JVM's thread of the query, which is this call's own: Spark's stop interrupts it (`Py4JError`)."""
    jvm = batch.sparkSession.sparkContext._jvm  # noqa: SLF001 - PySpark has no public way to its JVM
    if jvm is not None:
        jvm.java.lang.Thread.sleep(milliseconds)
