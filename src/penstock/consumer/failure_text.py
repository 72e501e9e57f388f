"""How the log shows what a handler raised: which kind it was and where, and not its text.

The text of an exception often quotes the message. Those of our own errors never do. The log record carries the error,
for a formatter of the user's that adds the text.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from penstock.errors import PenstockError, class_name


@dataclass(frozen=True, slots=True)
class LoggedFailure:
    """What a log record has as `failure`. Its `error` may quote the message, so neither `repr` nor a pickle has it."""

    error: BaseException = field(repr=False)

    def __reduce__(self) -> tuple[type[str], tuple[str]]:
        """Leave the process as text: an error need not be picklable."""
        return str, (repr(self),)


def attached(error: BaseException) -> dict[str, LoggedFailure]:
    """Return what a call of a logger takes as `extra`, so that a formatter finds an error."""
    return {"failure": LoggedFailure(error)}


def failure_text(error: BaseException) -> str:
    """Return an error with its stack and those it came from, the first cause first. Never raises."""
    return "\n".join("".join(_own_text(cause)) for cause in reversed(list(_chain(error))))


def short_text(error: BaseException) -> str:
    """Return the text of an error of ours, and the class of any other."""
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
