"""Write the pages and pictures that are made from the code: `make docs` runs it, and a test sees that they are current.

python docs/tools/generate.py
"""

from __future__ import annotations

from pathlib import Path

from command_page import command_page
from option_tables import with_tables
from pictures.guarantees import TIMELINES
from pictures.lanes import lanes
from pictures.offset_map import offset_map
from pictures.transaction import transaction

DOCS = Path(__file__).parents[1]


def generated() -> dict[Path, str]:
    """Return what is made, by where it stands."""
    pages = {
        DOCS / "commands.md": command_page(),
        DOCS / "options.md": with_tables((DOCS / "options.md").read_text()),
        DOCS / "spark.md": with_tables((DOCS / "spark.md").read_text()),
        DOCS / "images" / "lanes.svg": lanes(),
        DOCS / "images" / "transaction.svg": transaction(),
        DOCS / "images" / "offset-map.svg": offset_map(),
    }
    return pages | {DOCS / "images" / f"{name}.svg": one.svg() for name, one in TIMELINES.items()}


def main() -> None:
    """Write what has changed."""
    for path, text in generated().items():
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
            print(f"written: {path.relative_to(DOCS.parent)}")


if __name__ == "__main__":
    main()
