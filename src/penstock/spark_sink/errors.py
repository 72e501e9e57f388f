"""Errors of the Spark engine, distinguished by type, and the parser that finds these types in Spark's texts.

Of an exception that crosses Spark's JVM, only the text of its stack is left, with a line `module.Type: message`. The
types in such lines decide what happens to a query, never the words of a message.
"""

from __future__ import annotations

import pkgutil
import re

from penstock.clients.rights import MissingRightError
from penstock.errors import PenstockError, SinkError, SourceError

_RAISED = re.compile(r"^(penstock(?:\.\w+)+): (.*)$", re.MULTILINE)


class SchemaMismatchError(SinkError):
    """The frames of a query do not fit the target or the ledger of its sink."""


class DataLossError(SourceError):
    """Messages that a query should read are lost, and `failOnDataLoss` forbids going on without them."""


class SessionStoppedError(SinkError):
    """Spark's session was stopped under the queries of an app."""


def errors_in(text: str) -> list[PenstockError]:
    """Return penstock's errors in a text of Spark, in order, each with its message and without a stack."""
    found = [(_type_named(name), message) for name, message in _RAISED.findall(text)]
    return [error_of(kind, message) for kind, message in found if kind is not None]


def _type_named(name: str) -> type[PenstockError] | None:
    try:
        kind = pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return None  # a type of another version, installed on an executor
    return kind if isinstance(kind, type) and issubclass(kind, PenstockError) else None


def error_of(kind: type[PenstockError], message: str) -> PenstockError:
    """Return an error of a class with an existing message."""
    if issubclass(kind, MissingRightError):
        return MissingRightError.from_text(message)
    # Without the constructor: some take other arguments.
    error = kind.__new__(kind)
    error.args = (message,)
    return error
