"""The renderer: the result of a command, as tables and sentences or as one JSON object."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from enum import Enum

import click
import pytest
import typer

from penstock.cli.output import Result, Table, show
from penstock.errors import PenstockError
from penstock.places import place_of, place_text, topic_or_place


class State(Enum):
    UP = "up"


@dataclass(frozen=True)
class Row:
    name: str
    state: State
    age_s: float | None
    at_ms: int
    members: tuple[str, ...]
    is_silent: bool
    hidden: int = 1


ROWS = [
    Row("a\x1b[2Jb", State.UP, 3_700.0, 1_700_000_000_000, ("x", "y"), is_silent=True),
    Row("b", State.UP, None, -1, (), is_silent=False),
]
SHOWN = ("name", "state", "age_s", "at_ms", "members", "is_silent")


def test_a_value_looks_as_the_name_of_its_field_says_and_json_has_it_plain(capsys: pytest.CaptureFixture[str]) -> None:
    found = Result([Table("rows", ROWS, SHOWN)], {"group": "sms"}, lines=["first"], notes=["last\r"])

    show(found, as_json=False)
    printed = capsys.readouterr().out.splitlines()
    show(found, as_json=True)
    as_json = json.loads(capsys.readouterr().out)

    assert [line.split() for line in printed] == [
        ["first"],
        ["name", "state", "age", "at", "members", "is", "silent"],
        ["a\\x1b[2Jb", "up", "1", "h", "1", "min", "2023-11-14", "22:13:20", "UTC", "x,", "y", "yes"],
        ["b", "up", "-", "-", "-", "no"],
        ["last\\r"],
    ]
    assert as_json["rows"][0] == {"name": "a\x1b[2Jb", "state": "up", "age_s": 3_700.0, "at_ms": 1_700_000_000_000} | {
        "members": ["x", "y"],
        "is_silent": True,
        "hidden": 1,
    }
    assert (as_json["group"], as_json["notes"], "first" in as_json.values()) == ("sms", ["last\r"], False)


def test_a_block_has_a_line_for_each_field_that_has_a_value(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [{"place": "t:0@1", "group": None, "stack": ["one", "two\x1b"], "at_ms": 0}]

    show(Result([Table("rows", rows, blocks=True)]), as_json=False)

    assert capsys.readouterr().out.splitlines() == [
        "t:0@1",
        "  stack       one",
        "              two\\x1b",
        "  at          1970-01-01 00:00:00 UTC",
    ]


def test_a_limit_says_how_many_are_not_shown_and_json_has_all(capsys: pytest.CaptureFixture[str]) -> None:
    found = Result([Table("rows", ROWS, ("name",), limit=1)])

    show(found, as_json=False)
    printed = capsys.readouterr().out
    show(found, as_json=True)

    assert "1 more are not shown; see them with --limit 2" in printed
    assert len(json.loads(capsys.readouterr().out)["rows"]) == 2


@pytest.mark.parametrize("as_json", [False, True])
def test_what_was_found_is_printed_before_its_failure_is_raised(
    capsys: pytest.CaptureFixture[str], *, as_json: bool
) -> None:
    with pytest.raises(PenstockError, match="broke off"):
        show(Result([Table("rows", ROWS)], failure=PenstockError("broke off")), as_json=as_json)
    with pytest.raises((click.exceptions.Exit, typer.Exit)) as left:
        show(Result(code=1), as_json=as_json)

    assert "up" in capsys.readouterr().out
    assert left.value.exit_code == 1


def test_a_table_fits_the_terminal_and_a_row_into_a_pipe_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def printed(columns: int, *rows: tuple[str, str, str]) -> list[str]:
        monkeypatch.setenv("COLUMNS", str(columns))
        cells = [dict(zip(("topic", "committed", "done_above"), row, strict=True)) for row in rows]
        show(Result([Table("partitions", cells)]), as_json=False)
        return re.sub("\x1b\\[[0-9;]*m", "", capsys.readouterr().out).splitlines()  # without what makes them bold

    piped = printed(20, ("x" * 300, "1", "y z " * 100))
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("NO_COLOR", "1")
    rows = ("orders-of-the-year", "1000", "17"), ("a", "2", "")
    shown = {columns: printed(columns, *rows) for columns in (100, 40, 25)}

    assert len(piped) == 2
    assert all(len(line) <= columns for columns in (100, 40) for line in shown[columns])
    assert shown[25][:3] == ["orders-of-the-year", "  committed   1000", "  done above  17"]


def test_a_place_is_read_as_it_is_printed() -> None:
    assert place_of(place_text("a.b-c", 3, 17)) == ("a.b-c", 3, 17)
    assert place_of("3@17", "orders") == place_of("orders:3@17", "orders") == ("orders", 3, 17)
    assert topic_or_place("dlq.orders") == ("dlq.orders", None)
    assert topic_or_place("dlq.orders:0@1") == ("dlq.orders", (0, 1))
    assert place_text("orders", 3) == "orders:3"
