"""The gate before a sink's function: a stop closes it, so that the batch under way is finished and no other begun.

Spark's own stop interrupts a batch in its middle. Behind a closed gate the next batch waits in the JVM until Spark's
stop wakes it there. It never began, so Spark hands it over at the next start.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

#: Milliseconds of one wait of a batch behind the gate.
_PARK_MS = 1_000


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

    Spark's thread calls it; any thread may call the other methods. A batch that began while `close` was called is
    finished: Spark's trigger is active until then, and whoever stops the query waits for that. `park` waits some
    milliseconds on the thread of the batch; Spark's stop wakes it with any exception.
    """

    def __init__(
        self,
        function: Callable[[DataFrame, int], None],
        park: Callable[[DataFrame, int], None] | None = None,
    ) -> None:
        self._function = function
        self._park = park or sleep_in_jvm
        #: What the function raised, as it was; Spark keeps the text only.
        self.failure: BaseException | None = None
        #: Whether a batch waits behind the closed gate: those before it are committed.
        self.is_parked = False
        self.is_closed = False
        self._is_leaving = False

    def __call__(self, batch: DataFrame, batch_id: int) -> None:
        """Give the function a batch, or keep the batch waiting behind the closed gate."""
        if self.is_closed:
            self._wait_for_stop(batch)
            raise BatchLeftError(batch_id)
        try:
            self._function(batch, batch_id)
        except Exception as error:
            self.failure = error
            if self._is_leaving:
                # Spark's stop cancelled a job under the function: its text is long, see BatchLeftError.
                raise BatchLeftError(batch_id) from None
            raise

    def _wait_for_stop(self, batch: DataFrame) -> None:
        self.is_parked = True
        with suppress(Exception):  # however the stop shows, the batch is left
            while not self._is_leaving:
                self._park(batch, _PARK_MS)
            self._park(batch, _PARK_MS)  # Spark's stop, which follows, wakes it

    def close(self) -> None:
        """Let no further batch begin."""
        self.is_closed = True

    def leave(self) -> None:
        """Close it; Spark's stop follows, and whatever ends a batch from now on is that stop's effect."""
        self._is_leaving = self.is_closed = True


def sleep_in_jvm(batch: DataFrame, milliseconds: int) -> None:
    """Wait on the JVM's thread of the query, which is this call's own: Spark's stop interrupts it (`Py4JError`)."""
    jvm = batch.sparkSession.sparkContext._jvm  # noqa: SLF001 - PySpark has no public way to its JVM
    if jvm is not None:
        jvm.java.lang.Thread.sleep(milliseconds)
