"""The pages of the documentation, as tests read them: blocks of code, with where they stand."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
#: Every page, by its place in the repository.
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "SECURITY.md",
    ROOT / "deploy" / "README.md",
    ROOT / "benchmarks" / "NOTES.md",
    *sorted((ROOT / "docs").rglob("*.md")),
]
_BLOCK = re.compile(
    r"(?:^<!-- (?P<mark>[^\n]*) -->\n)?^```(?P<info>[^\n]*)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)


@dataclass(frozen=True, slots=True)
class Block:
    """A block of code."""

    page: Path
    line: int
    language: str
    title: str
    #: What an HTML comment in the line before it says.
    mark: str
    text: str

    @property
    def place(self) -> str:
        """Where it stands, for people."""
        return f"{self.page.relative_to(ROOT)}:{self.line}"


def blocks(page: Path) -> list[Block]:
    """Return the blocks of a page, in order."""
    text = page.read_text()
    found = []
    for match in _BLOCK.finditer(text):
        language, _, rest = match["info"].partition(" ")
        title = re.search(r'title="([^"]+)"', rest)
        line = text.count("\n", 0, match.start("text"))
        found.append(Block(page, line, language, title[1] if title else "", match["mark"] or "", match["text"]))
    return found
