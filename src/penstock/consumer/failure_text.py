"""Failure texts: how the log shows an error of a handler, with its class and its place but without its text.

The text of an exception often quotes the message. The texts of penstock's own errors never do. The log record carries
the error, so that a user's formatter can add the text.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from penstock.errors import PenstockError, class_name


@dataclass(frozen=True, slots=True)
class LoggedFailure:
    """The attribute `failure` of a log record. `repr` and pickles omit its `error`, which may quote the message."""

    error: BaseException = field(repr=False)

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        """Pickle it as text: an error need not be picklable."""
        return str, (repr(self),)


def attached(error: BaseException) -> dict[str, LoggedFailure]:
    """Return the `extra` of a logger's call, so that a formatter finds the error."""
    return {"failure": LoggedFailure(error)}


def failure_text(error: BaseException) -> str:
    """Return an error and its causes with their stacks, the first cause first. Never raises."""
    return "\n".join("".join(_own_text(cause)) for cause in reversed(list(_chain(error))))


def short_text(error: BaseException) -> str:
    """Return the text of an error of penstock, or the class of any other error."""
    return str(error) if _is_ours(error) else class_name(error)


def raised_where(error: BaseException) -> str:
    """Return the class of an error and the place in the code that raised it, without its text."""
    stack = traceback.extract_tb(error.__traceback__)
    if not stack:
        return type(error).__name__
    return f"{type(error).__name__} ({Path(stack[-1].filename).name} line {stack[-1].lineno}, {stack[-1].name})"


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        yield cause
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)


def _own_text(error: BaseException) -> Iterator[str]:
    if error.__traceback__ is not None:
        yield "Traceback (most recent call last):\n"
        yield from traceback.format_tb(error.__traceback__)
    yield class_name(error)
    if _is_ours(error):
        yield f": {error}"


def _is_ours(error: BaseException) -> bool:
    return isinstance(error, PenstockError) and type(error).__module__.startswith("penstock.")
