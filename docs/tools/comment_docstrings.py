"""An extension of griffe: the comment `#:` above a constant or a type is its docstring in the reference."""

from __future__ import annotations

from typing import Any

import griffe


class CommentDocstrings(griffe.Extension):
    """Takes the lines that begin with `#:` right above an attribute."""

    def on_attribute_instance(self, *, attr: griffe.Attribute, **_: Any) -> None:
        """Give an attribute without a docstring that of its comment."""
        if attr.docstring is not None or attr.lineno is None or not attr.filepath or isinstance(attr.filepath, list):
            return
        lines = attr.filepath.read_text().splitlines()[: attr.lineno - 1]
        said: list[str] = []
        while lines and (line := lines.pop().strip()).startswith("#:"):
            said.insert(0, line.removeprefix("#:").strip())
        if said:
            attr.docstring = griffe.Docstring("\n".join(said), parent=attr, lineno=attr.lineno)
