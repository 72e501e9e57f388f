"""Errors of the Spark engine, distinguished by type, and how a type is read in the text that Spark makes of an error.

Of an exception that crosses Spark's JVM only the text of its stack is left, with a line `module.Type: message`. What
becomes of a query hangs on the types in such lines, never on the words of a message.
"""

from __future__ import annotations

import pkgutil
import re

from penstock.clients.rights import MissingRightError
from penstock.errors import PenstockError, SinkError, SourceError

_RAISED = re.compile(r"^(penstock(?:\.\w+)+): (.*)$", re.MULTILINE)


class SchemaMismatchError(SinkError):
    """The frames of a query, what its sink writes to and the sink's ledger do not fit together."""


class DataLossError(SourceError):
    """Messages that a query was to read are gone, and `failOnDataLoss` forbids to go on without them."""


class SessionStoppedError(SinkError):
    """Spark's session was stopped under the queries of an app."""


def errors_in(text: str) -> list[PenstockError]:
    """Return the errors of penstock in a text of Spark's, in its order, each with its message and without a stack."""
    found = [(_type_named(name), message) for name, message in _RAISED.findall(text)]
    return [error_of(kind, message) for kind, message in found if kind is not None]


def _type_named(name: str) -> type[PenstockError] | None:
    try:
        kind = pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return None  # of another version, where an executor has one
    return kind if isinstance(kind, type) and issubclass(kind, PenstockError) else None


def error_of(kind: type[PenstockError], message: str) -> PenstockError:
    """Return an error of a kind with a message that was made elsewhere."""
    if issubclass(kind, MissingRightError):
        return MissingRightError.from_text(message)
    # By no constructor: some take other arguments than a message.
    error = kind.__new__(kind)
    error.args = (message,)
    return error
