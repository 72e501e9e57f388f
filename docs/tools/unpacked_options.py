"""An extension of griffe: a function that takes `**options: Unpack[...]` is shown with the options, one by one."""

from __future__ import annotations

import inspect
from enum import Enum
from pydoc import locate
from typing import Any

import griffe


class UnpackedOptions(griffe.Extension):
    """Takes names and defaults from the signature that `penstock.option_list` makes, types from the list."""

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        """Put the options in the place of the parameter that stands for them."""
        for parameter in list(func.parameters):
            kind = parameter.annotation
            if parameter.kind is not griffe.ParameterKind.var_keyword or not isinstance(kind, griffe.ExprSubscript):
                continue
            options = func.modules_collection[kind.slice.canonical_path]  # type: ignore[union-attr] # of an Unpack: a name
            del func.parameters[parameter.name]
            shown: Any = locate(func.path)
            for name, one in inspect.signature(shown).parameters.items():
                if name in options.members:
                    func.parameters[name] = griffe.Parameter(
                        name,
                        annotation=options.members[name].annotation,
                        kind=griffe.ParameterKind.keyword_only,
                        default=str(one.default) if isinstance(one.default, Enum) else repr(one.default),
                    )
