"""An extension of griffe: in the reference, a `#:` comment is the docstring of the constant or type below it."""

from __future__ import annotations

from typing import Any

import griffe


class CommentDocstrings(griffe.Extension):
    """Reads the lines that begin with `#:` directly above an attribute."""

    def on_attribute_instance(self, *, attr: griffe.Attribute, **_: Any) -> None:
        """Make a docstring of the comment if the attribute has none."""
        if attr.docstring is not None or attr.lineno is None or not attr.filepath or isinstance(attr.filepath, list):
            return
        lines = attr.filepath.read_text().splitlines()[: attr.lineno - 1]
        comment: list[str] = []
        while lines and (line := lines.pop().strip()).startswith("#:"):
            comment.insert(0, line.removeprefix("#:").strip())
        if comment:
            attr.docstring = griffe.Docstring("\n".join(comment), parent=attr, lineno=attr.lineno)
