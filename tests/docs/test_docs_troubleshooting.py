"""Every quoted log line of the page on troubleshooting is written by the code."""

from __future__ import annotations

import ast
import itertools
import re
from pathlib import Path

import penstock

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
#: Levels that a user sees, at least with logging switched on.
LEVELS = {"info", "warn", "warning", "error", "exception", "critical"}
#: Lines at WARNING and above that the page need not have: they pass another's sentence on, or are named by an error.
PASSED_ON = re.compile(r"^[^a-zA-Z]*(%s[^a-zA-Z]*)+$")


def logged() -> dict[str, str]:
    """Return the texts that the code logs, by place; a placeholder of them is `%s`."""
    found = {}
    for path in sorted(Path(penstock.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in LEVELS:
                # A `RationedLog` takes the name of the line first.
                for text in itertools.chain.from_iterable(map(texts, node.args[node.func.attr == "warn" :][:1])):
                    found[f"{path.name}:{node.lineno}:{node.func.attr}"] = re.sub(r"%[-+.\d]*[a-z]", "%s", text)
    return found


def texts(node: ast.expr) -> list[str]:
    """Return the constant text of a log call, where it is one."""
    return [node.value] if isinstance(node, ast.Constant) and isinstance(node.value, str) else []


def quoted() -> list[str]:
    """Return the first cells of the tables by log line."""
    tables = PAGE.split("## By log line", 1)[1].split("## By error")[0]
    cells = re.findall(r"^\| (`.*?`) \| [^`\n]*?[^|\n]* \| [^|\n]* \|$", tables, re.MULTILINE)
    lines = []
    for cell in cells:
        if cell.startswith("``` "):
            lines.append(cell.removeprefix("``` ").removesuffix(" ```"))
        elif cell.count("`") > 2 and "`, `" not in cell:
            lines.append(cell[1:-1])
        else:
            lines += re.findall(r"`([^`]+)`", cell)
    return lines


def matcher(line: str) -> re.Pattern[str]:
    """Return a pattern of a quoted line: `...` matches anything."""
    return re.compile(".*".join(re.escape(part.strip()) for part in line.split("...")), re.DOTALL)


def test_every_quoted_log_line_is_logged() -> None:
    said = list(logged().values())

    lines = quoted()

    assert len(lines) > 75
    assert [line for line in lines if not any(matcher(line).search(text) for text in said)] == []
