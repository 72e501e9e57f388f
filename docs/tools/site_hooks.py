"""What MkDocs calls while it builds the site: pages that stand elsewhere in the repository, and links to them.

The README is the site's first page, so that GitHub and the site have one. A page links to files by their places in the
repository; what is no page of the site is a page made of it (a program of `examples`), or an error of the build.
"""

from __future__ import annotations

import ast
import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[2]
#: Pages of the site by where they stand in the repository.
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security-policy.md",
    "deploy/README.md": "deployment.md",
    "benchmarks/NOTES.md": "measurements.md",
    "examples": "examples.md",
}
#: Files that are shown with their text, on one page of their folder.
_SHOWN = {"examples": "examples.md", "benchmarks": None, "deploy": "deployment.md"}
#: A public name of the reference, as a heading, and the text that is made below it.
DESCRIBED = re.compile(r"^(##+) `(penstock[\w.]+)`\n(.*?)(?=^##|\Z)", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(\]\()([^)\s]+)(\))")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that stand outside of `docs`."""
    for place, name in PAGES.items():
        path = ROOT / place
        text = path.read_text() if path.is_file() else examples()
        files.append(File.generated(config, name, content=relinked(text, place, name)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Have links that leave `docs` lead to the pages that stand for what they name, and docstrings stand as a whole."""
    del config, files
    if page.file.src_uri.startswith("reference/"):
        markdown = DESCRIBED.sub(
            lambda name: f"::: {name[2]}\n    options:\n      heading_level: {len(name[1])}\n\n", markdown
        )
    if page.file.generated_by is not None:
        return markdown
    return relinked(markdown, f"docs/{page.file.src_uri}", page.file.src_uri)


def relinked(text: str, place: str, name: str) -> str:
    """Return a page with its links as they are in the site.

    Args:
        text: the page.
        place: where it stands in the repository.
        name: what it is in the site.
    """
    here = posixpath.dirname(name)

    def of_site(match: re.Match[str]) -> str:
        link = match[2]
        if re.match(r"[a-z]+:|#", link):
            return match[0]
        path, _, anchor = link.partition("#")
        target = posixpath.normpath(posixpath.join(posixpath.dirname(place), path))
        found = page_of(target)
        if found is None:
            return match[0]
        to, own_anchor = found
        anchor = anchor or own_anchor
        return f"{match[1]}{posixpath.relpath(to, here or '.')}{'#' + anchor if anchor else ''}{match[3]}"

    return _LINK.sub(of_site, text)


def page_of(target: str) -> tuple[str, str] | None:
    """Return the page, and the anchor in it, that stands for a file of the repository; None where none does."""
    if target in PAGES:
        return PAGES[target], ""
    if target.startswith("docs/"):
        return target.removeprefix("docs/"), ""
    folder, _, file = target.partition("/")
    if folder in _SHOWN and file and _SHOWN[folder] is not None:
        anchor = re.sub(r"[^a-z0-9_]", "", file.lower()) if folder == "examples" else ""
        return str(_SHOWN[folder]), anchor
    return None


def examples() -> str:
    """Return a page with every program of `examples`, by its first sentence, and its text."""
    parts = [
        "# Examples\n",
        "Programs of the folder `examples`. Each runs in the tests as it stands here. `feed.py` makes the topics",
        "and messages of the others; `PENSTOCK_BOOTSTRAP_SERVERS` says where the brokers are (`penstock broker`",
        "runs one).\n",
        "| program | what it shows |",
        "|---|---|",
    ]
    programs = sorted((ROOT / "examples").glob("*.py"))
    for path in programs:
        said = (ast.get_docstring(ast.parse(path.read_text())) or "").split("\n")[0]
        parts.append(f"| [{path.name}](#{re.sub(r'[^a-z0-9_]', '', path.name)}) | {said} |")
    texts = [f"\n## {path.name}\n\n```python\n{path.read_text().rstrip()}\n```" for path in programs]
    return "\n".join([*parts, *texts])
