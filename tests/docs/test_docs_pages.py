"""All names on the pages exist: tests of guarantees, links, anchors, pictures, public names in the reference."""

from __future__ import annotations

import ast
import importlib
import re
from collections import Counter
from pathlib import Path

import pytest
from pages import PAGES, ROOT

from test_public_names import PACKAGES

REFERENCE = sorted((ROOT / "docs" / "reference").glob("*.md"))
GUARANTEES = sorted((ROOT / "docs" / "guarantees").glob("*.md"))


@pytest.mark.parametrize("page", [one for one in GUARANTEES if one.stem != "index"], ids=lambda page: page.stem)
def test_a_guarantee_has_its_parts_and_names_tests_that_exist(page: Path) -> None:
    text = page.read_text()

    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text)

    assert [
        one for one in ("## How", "## Timeline", "## What breaks it", "## Tests that hold it") if one not in text
    ] == []
    assert f"images/{page.stem}.svg" in text
    assert len(named) >= 5
    assert [f"{file}::{test}" for file, test in named if test not in defined_in(ROOT / file)] == []


def defined_in(file: Path) -> set[str]:
    """Return the names of the tests of a file."""
    if not file.is_file():
        return set()
    return {one.name for one in ast.walk(ast.parse(file.read_text())) if isinstance(one, ast.FunctionDef)}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings_that_exist(page: Path) -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", page.read_text())

    broken = [link for link in links if not re.match(r"[a-z]+:", link) and not leads_somewhere(page, link)]

    assert broken == []


def leads_somewhere(page: Path, link: str) -> bool:
    """Return whether a file and its heading exist, as GitHub finds them."""
    place, _, anchor = link.partition("#")
    target = page.parent / place if place else page
    if not target.exists():
        return False
    return not anchor or anchor in anchors(target.read_text())


def anchors(text: str) -> set[str]:
    """Return the anchors of a page's headings."""
    outside = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    heads = re.findall(r"^#+ (.+)$", outside, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", head.lower()).strip().replace(" ", "-") for head in heads}


def test_every_picture_is_shown_on_a_page() -> None:
    shown = {Path(one).name for page in PAGES for one in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", page.read_text())}

    assert {one.name for one in (ROOT / "docs" / "images").iterdir()} == shown


def test_every_public_name_has_one_place_in_the_reference() -> None:
    places = Counter(
        name for page in REFERENCE for name in re.findall(r"^##+ `(penstock[\w.]+)`$", page.read_text(), re.MULTILINE)
    )
    shown = [identity(name) for name in places]

    public = {f"{package}.{name}" for package in PACKAGES for name in importlib.import_module(package).__all__}
    wanted = {identity(name) for name in public - {"penstock.__version__"}}

    assert [name for name, count in places.items() if count > 1 or name not in public] == []
    assert [key for key, count in Counter(shown).items() if count > 1] == []
    assert wanted - set(shown) == set()


def identity(name: str) -> str:
    """Return what tells two names of one object: where a class or function is defined; the name alone for a value."""
    package, _, short = name.rpartition(".")
    found = getattr(importlib.import_module(package), short)
    home = getattr(found, "__module__", "")
    if home.startswith("penstock") and getattr(found, "__name__", "") == short:
        return f"{home}.{short}"
    return short
