"""What becomes of a query that ended with a failure: whether it is started again, when, and its failure in a line.

Plain arithmetic and types of errors: it knows neither Spark nor a clock. Of an exception that crossed Spark's JVM only
the text is left: its type is read there (`spark_sink.errors`), the words of its message decide nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from penstock.clients.rights import MissingRightError
from penstock.errors import ConfigurationError, MessageFormatError, TopicNotFoundError, causes
from penstock.spark_sink.errors import DataLossError, SchemaMismatchError, SessionStoppedError, errors_in

#: Seconds before the first restart, and at most before any; each wait is twice the one before.
FIRST_WAIT_S, LONGEST_WAIT_S = 1.0, 60.0

#: A wait is longer by up to this part of it, so that queries which failed together do not come back together.
JITTER = 0.25

#: Seconds before another try of a query that lacks a right: somebody gives it, and it goes on soon after.
RIGHT_WAIT_S = 10.0

#: What another start would meet again, or must not be made for.
_PERMANENT = (
    ConfigurationError,
    DataLossError,
    MessageFormatError,
    SchemaMismatchError,
    SessionStoppedError,
    TopicNotFoundError,
)

#: The same of Spark's errors, by their class and by their error condition.
_SPARK_KINDS = frozenset({"AnalysisException", "ParseException"})
_SPARK_NAMES = re.compile(r"\borg\.apache\.spark\.sql\.[\w.]*(?:AnalysisException|ParseException)\b")

#: What Spark says where two queries write to one checkpoint: to the logs of its batches, or to its other files.
_RIVAL = re.compile(r"\[CONCURRENT_STREAM_LOG_UPDATE]|Multiple streaming queries are concurrently using")

#: What Spark writes behind the reason: the query's plan and offsets.
_PLAN = "=== Streaming Query ==="

#: The last line of a Python stack.
_KIND_AND_TEXT = re.compile(r"^(?:\w+\.)*(\w*(?:Error|Exception|Warning)): (.+)$", re.MULTILINE)


#: A package that the source, or a sink on executors, is made of.
_NO_MODULE = re.compile(r"No module named '(penstock|confluent_kafka|pyarrow|xxhash|psycopg|sqlalchemy)\b")


@dataclass(slots=True)
class Restarts:
    """Counts the restarts of one query and says how long the next one waits. For one thread.

    At most `allowed` come in a row without a committed batch in between; `random` gives a number from 0 up to 1.
    """

    allowed: int
    random: Callable[[], float]
    in_a_row: int = field(default=0, init=False)
    total: int = field(default=0, init=False)

    def committed(self) -> None:
        """Begin counting anew: a batch was committed since the last restart."""
        self.in_a_row = 0

    def next_wait_s(self) -> float | None:
        """Count a restart and return the seconds it waits; None when no further one is allowed."""
        if self.in_a_row >= self.allowed:
            return None
        wait_s = min(LONGEST_WAIT_S, FIRST_WAIT_S * 2.0**self.in_a_row)
        self.in_a_row += 1
        self.total += 1
        return wait_s * (1 + JITTER * self.random())

    def wait_for_right_s(self) -> float:
        """Count a restart that waits for a right, and return the seconds: however many there are, none is too many."""
        self.total += 1
        return RIGHT_WAIT_S * (1 + JITTER * self.random())


def is_permanent(failure: BaseException) -> bool:
    """Tell whether another start would meet the same failure, or must not be made."""
    return any(
        isinstance(one, _PERMANENT)
        or any(kind.__name__ in _SPARK_KINDS for kind in type(one).__mro__)
        or _SPARK_NAMES.search(str(one)) is not None
        for one in _causes(failure)
    )


def has_rival(failure: BaseException) -> bool:
    """Tell whether a query ended because another one writes to its checkpoint."""
    return any(_RIVAL.search(str(one)) for one in _causes(failure))


def lacks_right(failure: BaseException) -> bool:
    """Tell whether a query ended because its client was refused what it has no right to."""
    return any(isinstance(one, MissingRightError) for one in _causes(failure))


def _causes(failure: BaseException) -> Iterator[BaseException]:
    """Yield a failure and its causes, those included that have crossed Spark's JVM as text."""
    for one in causes(failure):
        yield one
        yield from errors_in(str(one))


def summary_of(failure: BaseException) -> str:
    """Return a failure in one line: its kind and the first line of its text, out of Spark's wrapping where it is."""
    text = str(failure).split(_PLAN, 1)[0].strip()
    within = _KIND_AND_TEXT.findall(text)
    if "\n" in text and within:
        kind, line = within[-1]
    else:
        kind, line = type(failure).__name__, text.splitlines()[0] if text else "no text"
    remedy = lacking_package(line)
    return f"{kind}: {line.strip()}" + ("" if remedy is None else f"; {remedy}")


def lacking_package(text: str) -> str | None:
    """Return what to do about a Python of Spark's workers that lacks what penstock is made of, where a text says so."""
    found = _NO_MODULE.search(text)
    if found is None:
        return None
    return (
        f"the Python of Spark's workers has no {found[1]}: set PYSPARK_PYTHON to one that has it, or ship it "
        "(docs/spark-cluster.md)"
    )
