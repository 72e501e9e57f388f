"""The table of rights in docs/security.md, read, and what a broker was asked for, written in the same form."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from penstock.devbroker import AskedRight
from rights import Right

DOCUMENT = Path(__file__).parents[2] / "docs" / "security.md"

#: Operations that contain DESCRIBE, by Kafka's rules (`StandardAuthorizerData`).
_WITH_DESCRIBE = frozenset({"READ", "WRITE", "DELETE", "ALTER"})


@dataclass(frozen=True)
class Documented:
    """What the table says of one part: rights that it needs, and rights that it can do without."""

    needed: frozenset[Right]
    optional: frozenset[Right]


def documented(text: str) -> dict[str, Documented]:
    """Return what the table says of each part, with placeholders as they stand."""
    needed: dict[str, set[Right]] = {}
    optional: dict[str, set[Right]] = {}
    in_table = False
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
        if cells == ["part", "on", "name", "operations"]:
            in_table = True
        elif not cells:
            in_table = False
        elif in_table and not set(cells[0]) <= {"-"}:
            part, resource, name, operations = cells
            bare = name.strip("`")
            for operation in operations.split():
                kind = optional if operation.startswith("(") else needed
                right = Right(resource.replace(" ", "_"), bare.rstrip("*"), operation.strip("()"), bare.endswith("*"))
                kind.setdefault(part, set()).add(right)
    parts = needed.keys() | optional.keys()
    return {part: Documented(frozenset(needed.get(part, ())), frozenset(optional.get(part, ()))) for part in parts}


def commanded(text: str) -> dict[str, set[Right]]:
    """Return what the lines for `kafka-acls.sh` give to each user."""
    given: dict[str, set[Right]] = {}
    for line in text.splitlines():
        if line.startswith("--add --allow-principal User:"):
            words = line.split()
            options = list(itertools.pairwise(words))
            named = [word for option, word in options if option == "--operation"]
            operations = [re.sub(r"(?<=[a-z])(?=[A-Z])", "_", word).upper() for word in named]
            is_prefix = ("--resource-pattern-type", "prefixed") in options
            for option in ("--topic", "--group", "--transactional-id"):
                kind = option.strip("-").replace("-", "_")
                for name in (word for given_option, word in options if given_option == option):
                    rights = given.setdefault(words[2].removeprefix("User:"), set())
                    rights.update(Right(kind, name, operation, is_prefix) for operation in operations)
    return given


def filled_in(right: Right, names: Mapping[str, str]) -> Right:
    """Return the right with names in place of placeholders."""
    name = re.sub(r"<(\w+)>", lambda match: names[match[1]], right.name)
    return Right(right.resource, name, right.operation, right.is_prefix)


def covers(right: Right, asked: AskedRight) -> bool:
    """Tell whether the right is what was asked for, or contains it."""
    is_named = asked.name.startswith(right.name) if right.is_prefix else asked.name == right.name
    contains = asked.operation == right.operation or (
        asked.operation == "DESCRIBE" and right.operation in _WITH_DESCRIBE
    )
    return right.resource == asked.resource and is_named and contains


def differences(
    table: Documented, names: Mapping[str, str], asked: Iterable[AskedRight]
) -> tuple[list[AskedRight], list[Right]]:
    """Return what the table misses, and what it names and nothing needs.

    Args:
        table: what it says of a part.
        names: what its placeholders stand for.
        asked: what the broker was asked for by a user with the rights that the table calls needed, and no others.
    """
    needed = {filled_in(right, names) for right in table.needed}
    optional = {filled_in(right, names) for right in table.optional}
    found = list(asked)
    missing = [one for one in found if not one.allowed and not any(covers(right, one) for right in optional)]
    allowed = [one for one in found if one.allowed]
    return missing, [right for right in sorted(needed) if not _is_used(right, needed - {right}, allowed)]


def _is_used(right: Right, others: Iterable[Right], asked: Iterable[AskedRight]) -> bool:
    """Tell whether this right itself was asked for, not only one that it contains, and none of the others gives it."""
    return any(
        covers(right, one) and one.operation == right.operation and not any(covers(other, one) for other in others)
        for one in asked
    )


def as_table(part: str, names: Mapping[str, str], asked: Iterable[AskedRight]) -> str:
    """Return the rows of the table for a part, by what was asked for."""
    rows: dict[tuple[str, str], set[str]] = {}
    placeholders = sorted(names.items(), key=lambda item: -len(item[1]))
    for one in asked:
        name = one.name
        for placeholder, value in placeholders:
            name = name.replace(value, f"<{placeholder}>")
        name = re.sub(r"(sql-|file\.|coordinator\.)[0-9a-f]{8}.*", r"\1*", name)
        rows.setdefault((one.resource.replace("_", " "), name), set()).add(
            one.operation if one.allowed else f"({one.operation})"
        )
    lines = []
    for (resource, name), operations in sorted(rows.items()):
        kept = operations - {"DESCRIBE"} if operations & _WITH_DESCRIBE else operations
        lines.append(f"| {part} | {resource} | `{name}` | {' '.join(sorted(kept))} |")
    return "\n".join(lines)
