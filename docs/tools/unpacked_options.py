"""An extension of griffe: shows each option of a function with `**options: Unpack[...]`."""

from __future__ import annotations

import inspect
from enum import Enum
from pydoc import locate
from typing import Any

import griffe


class UnpackedOptions(griffe.Extension):
    """Reads names and defaults from the signature that `penstock.option_list` makes, and types from the list."""

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        """Replace the `**options` parameter with the options."""
        for parameter in list(func.parameters):
            kind = parameter.annotation
            if parameter.kind is not griffe.ParameterKind.var_keyword or not isinstance(kind, griffe.ExprSubscript):
                continue
            declared = func.modules_collection[kind.slice.canonical_path]  # type: ignore[union-attr] # of an Unpack: a name
            del func.parameters[parameter.name]
            shown: Any = locate(func.path)
            for name, option in inspect.signature(shown).parameters.items():
                if name in declared.all_members:
                    func.parameters[name] = griffe.Parameter(
                        name,
                        annotation=declared.all_members[name].annotation,
                        kind=griffe.ParameterKind.keyword_only,
                        default=str(option.default) if isinstance(option.default, Enum) else repr(option.default),
                    )
