"""The site builds without a warning, fetches nothing from other servers, and its generated pages are current."""

from __future__ import annotations

import importlib
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from generate import GENERATED

from test_public_names import INNER, PACKAGES

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built as `make docs` builds it."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "WARNING" not in done.stdout + done.stderr
    return folder


@pytest.mark.thorough
def test_the_site_fetches_nothing_from_elsewhere_when_it_is_read(site: Path) -> None:
    fetched = re.compile(
        r"<(?:script|img|iframe)[^>]+src=\"?https?:[^>]*|<link[^>]+stylesheet[^>]+https?:[^>]*|url\(https?:"
    )

    pages = [*site.rglob("*.html"), *site.rglob("*.css")]

    assert len(pages) > 30
    assert {str(page.relative_to(site)): found for page in pages if (found := fetched.findall(page.read_text()))} == {}


@pytest.mark.thorough
def test_the_site_holds_no_place_of_the_machine_that_built_it(site: Path) -> None:
    pages = {page: page.read_text() for page in site.rglob("*.html")}

    assert [page.name for page, text in pages.items() if str(ROOT) in text] == []


@pytest.mark.parametrize("page", GENERATED, ids=lambda page: page.name)
def test_what_is_made_from_the_code_is_current(page: Path) -> None:
    assert page.read_text() == GENERATED[page](), "run `make docs`, and commit what it writes"


@pytest.mark.thorough
def test_the_reference_shows_every_public_method_also_those_that_are_inherited(site: Path) -> None:
    anchors = {one for page in site.glob("reference/*.html") for one in re.findall(r'id="([\w.]+)"', page.read_text())}
    ends = {".".join(one.rsplit(".", 2)[1:]) for one in anchors}

    missing = [one for one in methods() if one not in ends]

    assert len(ends) > 300
    assert missing == []


@pytest.mark.thorough
def test_the_reference_says_something_of_every_name(site: Path) -> None:
    part = re.compile(r'<h[234] id="(penstock[\w.]+)".*?</h[234]>(.*?)(?=<h[234] id=|</article>)', re.DOTALL)
    code = re.compile(r"<pre.*?</pre>|<[^>]+>", re.DOTALL)

    parts = [one for page in site.glob("reference/*.html") for one in part.findall(page.read_text())]

    assert len(parts) > 300
    assert [name for name, said in parts if not code.sub("", said).strip()] == []


def methods() -> list[str]:
    """Return the public methods of public classes that have a docstring, as `Class.method`."""
    found = set()
    for package in PACKAGES:
        home = importlib.import_module(package)
        for name in set(home.__all__) - INNER:
            one = getattr(home, name)
            if not inspect.isclass(one) or one.__name__ != name or not one.__module__.startswith("penstock"):
                continue
            for method, function in inspect.getmembers(one, inspect.isfunction):
                if not method.startswith("_") and function.__module__.startswith("penstock") and function.__doc__:
                    found.add(f"{name}.{method}")
    return sorted(found)
