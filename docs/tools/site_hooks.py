"""Hooks of MkDocs: add pages from outside of `docs`, and change links to them.

The README is the first page of GitHub and of the site. A page links to files by their paths in the repository. A link
to a program of `examples` leads to a generated page; a link to another file without a page is an error of the build.
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
#: Pages of the site, by their paths in the repository.
PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security-policy.md",
    "deploy/README.md": "deployment.md",
    "benchmarks/NOTES.md": "measurements.md",
    "examples": "examples.md",
}
#: The page that shows the files of a folder; None: no page.
_SHOWN = {"examples": "examples.md", "benchmarks": None, "deploy": "deployment.md"}
#: A heading of the reference that is a public name, and the generated text below it.
DESCRIBED = re.compile(r"^(##+) `(penstock[\w.]+)`\n(.*?)(?=^##|\Z)", re.MULTILINE | re.DOTALL)
_LINK = re.compile(r"(\]\()([^)\s]+)(\))")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages from outside of `docs`."""
    for place, name in PAGES.items():
        path = ROOT / place
        text = path.read_text() if path.is_file() else examples()
        files.append(File.generated(config, name, content=relinked(text, place, name)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Change links that leave `docs`, and insert whole docstrings."""
    del config, files
    if page.file.src_uri.startswith("reference/"):
        markdown = DESCRIBED.sub(
            lambda name: f"::: {name[2]}\n    options:\n      heading_level: {len(name[1])}\n\n", markdown
        )
    if page.file.generated_by is not None:
        return markdown
    return relinked(markdown, f"docs/{page.file.src_uri}", page.file.src_uri)


def relinked(text: str, place: str, name: str) -> str:
    """Return a page with the links of the site.

    Args:
        text: the page.
        place: its path in the repository.
        name: its path in the site.
    """
    folder = posixpath.dirname(name)

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
        return f"{match[1]}{posixpath.relpath(to, folder or '.')}{'#' + anchor if anchor else ''}{match[3]}"

    return _LINK.sub(of_site, text)


def page_of(target: str) -> tuple[str, str] | None:
    """Return the page that shows a file of the repository, and the anchor in it; None if no page shows it."""
    if target in PAGES:
        return PAGES[target], ""
    if target.startswith("docs/"):
        return target.removeprefix("docs/"), ""
    folder, _, file = target.partition("/")
    if folder in _SHOWN and file and _SHOWN[folder] is not None:
        is_program = folder == "examples" and file.endswith(".py")
        anchor = re.sub(r"[^a-z0-9_]", "", file.lower()) if is_program else ""
        return str(_SHOWN[folder]), anchor
    return None


def examples() -> str:
    """Return a page with the first sentence and the text of every program of `examples`."""
    parts = [
        "# Examples\n",
        "Programs of the folder `examples`. Each runs in the tests as it stands here. `feed.py` makes the topics and",
        "messages of the others. Set `PENSTOCK_BOOTSTRAP_SERVERS` to the addresses of the brokers (`penstock broker`",
        "runs one).\n",
        "| program | what it shows |",
        "|---|---|",
    ]
    programs = sorted((ROOT / "examples").glob("*.py"))
    for path in programs:
        summary = (ast.get_docstring(ast.parse(path.read_text())) or "").split("\n")[0]
        parts.append(f"| [{path.name}](#{re.sub(r'[^a-z0-9_]', '', path.name)}) | {summary} |")
    texts = [f"\n## {path.name}\n\n```python\n{path.read_text().rstrip()}\n```" for path in programs]
    return "\n".join([*parts, *texts])
