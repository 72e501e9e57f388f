"""The table of permissions in docs/security.md, compared with the requests that a broker received."""

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
WITH_DESCRIBE = frozenset({"READ", "WRITE", "DELETE", "ALTER"})


@dataclass(frozen=True)
class Documented:
    """The rows of one part: required permissions and optional ones."""

    needed: frozenset[Right]
    optional: frozenset[Right]


def documented(text: str) -> dict[str, Documented]:
    """Return the rows of each part, with their placeholders."""
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
    """Return the permissions of each user in the lines for `kafka-acls.sh`."""
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
    """Return the right with names instead of placeholders."""
    name = re.sub(r"<(\w+)>", lambda match: names[match[1]], right.name)
    return Right(right.resource, name, right.operation, right.is_prefix)


def covers(right: Right, asked: AskedRight) -> bool:
    """Return whether the permission is the requested one, or contains it."""
    is_named = asked.name.startswith(right.name) if right.is_prefix else asked.name == right.name
    contains = asked.operation == right.operation or (
        asked.operation == "DESCRIBE" and right.operation in WITH_DESCRIBE
    )
    return right.resource == asked.resource and is_named and contains


def differences(
    table: Documented, names: Mapping[str, str], asked: Iterable[AskedRight]
) -> tuple[list[AskedRight], list[Right]]:
    """Return the permissions that the table misses, and those that nothing needs.

    Args:
        table: what it says of a part.
        names: what its placeholders stand for.
        asked: what the broker was asked for by a user who had what the table calls needed, at last, and never more.
    """
    needed = {filled_in(right, names) for right in table.needed}
    known = needed | {filled_in(right, names) for right in table.optional}
    found = list(asked)
    missing = [right for right in found if not right.allowed and not any(covers(row, right) for row in known)]
    allowed = [right for right in found if right.allowed]
    return missing, [right for right in sorted(needed) if not _is_used(right, needed - {right}, allowed)]


def _is_used(right: Right, others: Iterable[Right], asked: Iterable[AskedRight]) -> bool:
    """Return whether exactly this permission was needed, not only a contained one, and no other one gives it."""
    return any(
        covers(right, one) and one.operation == right.operation and not any(covers(other, one) for other in others)
        for one in asked
    )
