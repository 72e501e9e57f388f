"""An option list that several functions take: written once, as a `TypedDict`, and shown by each of them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import ParamSpec, TypeVar

from penstock.options import nearest

ParametersP = ParamSpec("ParametersP")
ResultT = TypeVar("ResultT")

_KEYWORD = inspect.Parameter.KEYWORD_ONLY
_LIKENESS = 0.6


def takes_options(
    options: type, defaults: Mapping[str, object]
) -> Callable[[Callable[ParametersP, ResultT]], Callable[ParametersP, ResultT]]:
    """Return a decorator for a function with a last parameter `**given: Unpack[options]`.

    The function gets all of the options: those that the caller left out with their defaults. Its signature lists them
    one by one, for `help()` and whoever else looks. As of any function, another name is a `TypeError`.

    Args:
        options: a `TypedDict`.
        defaults: the value of each option where it is left out.
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
