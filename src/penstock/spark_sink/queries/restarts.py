"""What becomes of a query that ended with a failure: whether another start helps, and the failure in one line.

It judges by the types of errors. Of an exception that crossed Spark's JVM only text is left: penstock's types are read
there (`spark_sink.errors`), Spark's by class and error condition. The words of a message decide nothing.
"""

from __future__ import annotations

import re
from enum import Enum, auto

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

#: The same of Spark's errors: their class, and its name in a stack of the JVM.
_SPARK_KIND = re.compile(r"(?:pyspark\.errors|org\.apache\.spark\.sql)\.[\w.]*(?:AnalysisException|ParseException)\b")

#: What Spark says where two queries write to one checkpoint: to the logs of its batches, or to its other files.
_RIVAL = re.compile(r"\[CONCURRENT_STREAM_LOG_UPDATE]|Multiple streaming queries are concurrently using")

#: What Spark writes behind the reason: the query's plan and offsets.
_PLAN = "=== Streaming Query ==="

#: The last line of a Python stack.
_KIND_AND_TEXT = re.compile(r"^(?:\w+\.)*(\w*(?:Error|Exception|Warning)): (.+)$", re.MULTILINE)

#: A package that the source, or a sink on executors, is made of.
_NO_MODULE = re.compile(r"No module named '(penstock|confluent_kafka|pyarrow|xxhash|psycopg|sqlalchemy)\b")


class FailureKind(Enum):
    """What another start of a failed query would meet."""

    #: Perhaps nothing: a neighbour was away.
    PASSING = auto()
    #: The same failure.
    PERMANENT = auto()
    #: The same failure, until somebody gives a permission.
    MISSING_RIGHT = auto()
    #: The other query that writes to its checkpoint, unless that has ended: a frozen replica's ends once or twice.
    RIVAL = auto()


def kind_of(failure: BaseException) -> FailureKind:
    """Return what another start would meet after a failure."""
    found = [*causes(failure)]
    found += [error for cause in found for error in errors_in(str(cause))]
    if any(_RIVAL.search(str(cause)) for cause in found):
        return FailureKind.RIVAL
    if any(isinstance(cause, _PERMANENT) or _SPARK_KIND.search(f"{type(cause).__mro__} {cause}") for cause in found):
        return FailureKind.PERMANENT
    if any(isinstance(cause, MissingRightError) for cause in found):
        return FailureKind.MISSING_RIGHT
    return FailureKind.PASSING


def is_permanent(failure: BaseException) -> bool:
    """Tell whether another start would meet the same failure, whatever is waited for."""
    return kind_of(failure) is FailureKind.PERMANENT


def summary_of(failure: BaseException) -> str:
    """Return a failure in one line: its kind and the first line of its text, without Spark's wrapping."""
    if kind_of(failure) is FailureKind.RIVAL:
        return "another query writes to the same checkpoint: stop one, or give each a checkpoint_location of its own"
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
