"""Generates the pages of `docs/reference`: signature and first sentences below each heading that is a public name.

GitHub shows this text. On the site `site_hooks` replaces it with the whole docstring.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import griffe
from comment_docstrings import CommentDocstrings
from site_hooks import DESCRIBED
from unpacked_options import UnpackedOptions

import penstock

_WIDTH = 100


def with_descriptions(page: str) -> str:
    """Return a page of the reference with the descriptions of its names updated from the code."""
    return DESCRIBED.sub(_described, page).rstrip() + "\n"


def _described(found: re.Match[str]) -> str:
    return "\n\n".join((f"{found[1]} `{found[2]}`", *_description(found[2]))) + "\n\n"


def _description(name: str) -> Iterator[str]:
    found = _package()[name.removeprefix("penstock.")]
    if found.is_alias:
        found = found.final_target
    if signature := _signature(found):
        kept = re.sub("(?<!,) ", "\0", signature)  # lines break only after commas
        lines = textwrap.fill(kept, _WIDTH, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
        yield "```text\n" + lines.replace("\0", " ") + "\n```"
    yield _first_paragraph(found)
    if found.is_class:
        members = [
            f"- `{short}{'()' if member.is_function else ''}`: {_first_paragraph(member)}"
            for short, member in found.all_members.items()
            if not short.startswith("_") and member.docstring
        ]
        if members:
            yield "\n".join(members)


def _signature(found: griffe.Object) -> str:
    if isinstance(found, griffe.Class | griffe.Function):
        return found.signature()
    return f"{found.name} = {found.value}" if isinstance(found, griffe.Attribute) else ""


def _first_paragraph(found: griffe.Object | griffe.Alias) -> str:
    text = found.docstring.value if found.docstring else ""
    return " ".join(text.split("\n\n")[0].split())


@cache
def _package() -> griffe.Object | griffe.Alias:
    return griffe.load(
        "penstock",
        search_paths=[Path(penstock.__file__).parents[1]],
        extensions=griffe.load_extensions(CommentDocstrings, UnpackedOptions),
        resolve_aliases=True,
    )
