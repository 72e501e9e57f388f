"""Lists of options: lists that several functions share, the options that a program states, and removed names.

A shared list is written once, as a `TypedDict`, and appears in the signature of each function.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Concatenate, Final, ParamSpec, TypeVar

from penstock.errors import ConfigurationError
from penstock.options import nearest

ParametersP = ParamSpec("ParametersP")
ResultT = TypeVar("ResultT")

OwnerT = TypeVar("OwnerT")

#: Removed options, and what to write instead.
REMOVED: Final[Mapping[str, str]] = {
    "check_listener": "give its method as check=",
    "deferred_timeout": "give each completion its own: DeferredCompletion(timeout=...)",
    "exception_texts": "show the texts by a logging.Formatter: see docs/security.md",
    "max_parked": "max_in_flight limits what is set aside, too",
    "max_parked_bytes": "a quarter of max_in_flight_bytes limits what is set aside",
    "one_core": "leave it out; to keep the whole process on a core, start it with `taskset -c 1`",
    "retry_policy": "write retry=",
    "ReportSettings.stacks": "the action Stacks shows the stacks of a member, and running.stacks() those of a process",
    "SinkRegistry.sink.group": "the offsets of <app>-sinks, the group of the app's sinks, follow them all",
}

_KEYWORD = inspect.Parameter.KEYWORD_ONLY
_LIKENESS = 0.6


def takes_options(
    options: type, defaults: Mapping[str, object]
) -> Callable[[Callable[ParametersP, ResultT]], Callable[ParametersP, ResultT]]:
    """Return a decorator for a function whose last parameter is `**given: Unpack[options]`.

    The function receives all options, with defaults for those that the caller leaves out. Its signature lists them one
    by one, for `help()` and editors. An unknown name raises `TypeError`, as in any function.

    Args:
        options: a `TypedDict`.
        defaults: the default of each option.
    """

    def decorate(function: Callable[ParametersP, ResultT]) -> Callable[ParametersP, ResultT]:
        signature = inspect.signature(function)
        *own, _given = signature.parameters.values()
        kinds = options.__annotations__
        listed = [
            inspect.Parameter(name, _KEYWORD, default=defaults[name], annotation=getattr(kind, "__forward_arg__", kind))
            for name, kind in kinds.items()
        ]
        known = {option.name for option in own} | kinds.keys()

        @functools.wraps(function)
        def checked(*args: ParametersP.args, **given: ParametersP.kwargs) -> ResultT:
            refuse_removed(function.__qualname__, given)
            for name in given:
                if name not in known:
                    meant = nearest(name, known, _LIKENESS)
                    remedy = f". Did you mean {meant!r}?" if meant else ""
                    raise TypeError(f"{function.__qualname__}() got an unexpected keyword argument {name!r}{remedy}")
            given.update({name: value for name, value in defaults.items() if name not in given})
            return function(*args, **given)

        checked.__signature__ = signature.replace(parameters=[*own, *listed])  # type: ignore[attr-defined] # as inspect reads it
        return checked

    return decorate


def refuse_removed(place: str, given: Iterable[str]) -> None:
    """Raise `ConfigurationError` for a removed option, of this place or of all, with what to write instead."""
    for name in given:
        remedy = REMOVED.get(f"{place}.{name}", REMOVED.get(name))
        if remedy is not None:
            raise ConfigurationError(f"{place} has no option {name} any more: {remedy}")


def refusing_removed(
    make: Callable[Concatenate[OwnerT, ParametersP], None],
) -> Callable[Concatenate[OwnerT, ParametersP], None]:
    """Return an `__init__` that first refuses removed options."""

    @functools.wraps(make)
    def checked(self: OwnerT, /, *args: ParametersP.args, **given: ParametersP.kwargs) -> None:
        refuse_removed(type(self).__name__, given)
        make(self, *args, **given)

    return checked


def noting_stated(
    make: Callable[Concatenate[OwnerT, ParametersP], None],
) -> Callable[Concatenate[OwnerT, ParametersP], None]:
    """Return an `__init__` that first stores the names of its given options in `stated`."""

    @functools.wraps(make)
    def noted(self: OwnerT, /, *args: ParametersP.args, **given: ParametersP.kwargs) -> None:
        vars(self)["stated"] = frozenset(given)
        make(self, *args, **given)

    return noted
