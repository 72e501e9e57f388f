"""What becomes of a query that ended with a failure: whether another start helps, and the failure in one line.

It judges by the types of errors. Of an exception that crossed Spark's JVM only text is left: penstock's types are read
there (`spark_sink.errors`), Spark's by class and error condition. The words of a message decide nothing.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from penstock.clients.rights import MissingRightError
from penstock.errors import ConfigurationError, MessageFormatError, TopicNotFoundError, causes
from penstock.spark_sink.errors import DataLossError, SchemaMismatchError, SessionStoppedError, errors_in

#: Seconds before the first restart, and at most before any; each wait is twice the one before.
FIRST_WAIT_S, LONGEST_WAIT_S = 1.0, 60.0

#: Seconds before another try of a query that lacks a permission, which somebody may give.
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

#: The same of Spark's errors, by their class, and by its name in a stack of the JVM.
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


def wait_s(restarts: int) -> float:
    """Return the seconds before the next restart, after so many in a row."""
    return min(LONGEST_WAIT_S, FIRST_WAIT_S * 2.0**restarts)


def is_permanent(failure: BaseException) -> bool:
    """Return whether another start would meet the same failure, or must not be made."""
    return any(
        isinstance(cause, _PERMANENT)
        or any(kind.__name__ in _SPARK_KINDS for kind in type(cause).__mro__)
        or _SPARK_NAMES.search(str(cause)) is not None
        for cause in _causes(failure)
    )


def has_rival(failure: BaseException) -> bool:
    """Return whether a query ended because another one writes to its checkpoint."""
    return any(_RIVAL.search(str(cause)) for cause in _causes(failure))


def lacks_right(failure: BaseException) -> bool:
    """Return whether a query ended because its client lacks a permission."""
    return any(isinstance(cause, MissingRightError) for cause in _causes(failure))


def _causes(failure: BaseException) -> Iterator[BaseException]:
    """Yield a failure and its causes, with those that crossed Spark's JVM as text."""
    for cause in causes(failure):
        yield cause
        yield from errors_in(str(cause))


def summary_of(failure: BaseException) -> str:
    """Return a failure in one line: its kind and the first line of its text, without Spark's wrapping."""
    text = str(failure).split(_PLAN, 1)[0].strip()
    within = _KIND_AND_TEXT.findall(text)
    if "\n" in text and within:
        kind, line = within[-1]
    else:
        kind, line = type(failure).__name__, text.splitlines()[0] if text else "no text"
    remedy = lacking_package(line)
    return f"{kind}: {line.strip()}" + ("" if remedy is None else f"; {remedy}")


def lacking_package(text: str) -> str | None:
    """Return what to do where the Python of Spark's workers lacks a package of penstock's, or None."""
    found = _NO_MODULE.search(text)
    if found is None:
        return None
    return (
        f"the Python of Spark's workers has no {found[1]}: set PYSPARK_PYTHON to one that has it, or ship it "
        "(docs/spark-cluster.md)"
    )
