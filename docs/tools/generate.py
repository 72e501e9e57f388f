"""Generates pages and pictures of docs/ from the code. `make docs` runs it, and a test checks that they are current.

python docs/tools/generate.py
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from command_page import command_page
from option_tables import with_tables
from pictures.guarantees import TIMELINES
from pictures.lanes import lanes
from pictures.offset_map import offset_map
from pictures.transaction import transaction
from reference_pages import with_descriptions

DOCS = Path(__file__).parents[1]


def _completed(complete: Callable[[str], str], page: Path) -> str:
    return complete(page.read_text())


#: The function that returns the text of each page or picture, by its path.
GENERATED: dict[Path, Callable[[], str]] = {
    DOCS / "commands.md": command_page,
    **{page: partial(_completed, with_tables, page) for page in (DOCS / "options.md", DOCS / "spark.md")},
    **{page: partial(_completed, with_descriptions, page) for page in sorted((DOCS / "reference").glob("*.md"))},
    DOCS / "images" / "lanes.svg": lanes,
    DOCS / "images" / "transaction.svg": transaction,
    DOCS / "images" / "offset-map.svg": offset_map,
    **{DOCS / "images" / f"{name}.svg": timeline.svg for name, timeline in TIMELINES.items()},
}


def main() -> None:
    """Write the pages and pictures that changed."""
    for path, make in GENERATED.items():
        text = make()
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
            print(f"written: {path.relative_to(DOCS.parent)}")


if __name__ == "__main__":
    main()
