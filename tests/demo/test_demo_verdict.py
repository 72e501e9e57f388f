"""The verdict: green when all found is as promised, and red in words and colour where it is not."""

from __future__ import annotations

import io

from demo.verdict import differing, equal, kept, rate, table
from rich.console import Console


def test_a_count_that_differs_breaks_the_verdict_and_a_rate_does_not() -> None:
    right = [equal("duplicates", 0, 0), rate("messages handled", 12.5)]

    assert kept(right)
    assert not kept([*right, equal("messages in the topic", 980, 981)])
    assert not kept([*right, equal("messages in the topic", 980, 979)])


def test_a_broken_promise_is_printed_in_red_and_in_words() -> None:
    console = Console(file=io.StringIO(), width=160, color_system="standard", force_terminal=True)
    console.print(table("title", [equal("undecided transactions", 0, 0), equal("duplicates", 0, 1)]))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]  # a StringIO was given above

    (broken,) = [line for line in lines if "BROKEN" in line]
    assert "duplicates" in broken
    assert "\x1b[1;31m" in broken
    assert not any("\x1b[1;31m" in line for line in lines if "undecided" in line)


def test_a_key_that_only_one_side_has_differs() -> None:
    assert differing({"a": 1, "b": 2}, {"a": 1, "b": 2}) == 0
    assert differing({"a": 1, "b": 2}, {"a": 1, "c": 2}) == 2
    assert differing({"a": 1}, {"a": 2}) == 1
