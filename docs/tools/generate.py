"""Write the pages and pictures that are made from the code: `make docs` runs it, and a test sees that they are current.

python docs/tools/generate.py
"""

from __future__ import annotations

from pathlib import Path

from command_page import command_page

DOCS = Path(__file__).parents[1]


def generated() -> dict[Path, str]:
    """Return what is made, by where it stands."""
    return {DOCS / "commands.md": command_page()}


def main() -> None:
    """Write what has changed."""
    for path, text in generated().items():
        if not path.exists() or path.read_text() != text:
            path.write_text(text)
            print(f"written: {path.relative_to(DOCS.parent)}")


if __name__ == "__main__":
    main()
