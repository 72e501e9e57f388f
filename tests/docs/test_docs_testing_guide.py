"""The tests that the page on testing shows pass, with the brokers and the Spark of this run instead of their own."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from pages import ROOT, blocks

PROGRAMS = {one.title: one for one in blocks(ROOT / "docs" / "testing.md") if one.language == "python"}
#: What the fixtures of the page are here.
FIXTURES = {"kafka": "broker", "secured_kafka": "secured"}
TESTS = [
    (title, line.split("(")[0].removeprefix("def "))
    for title, program in PROGRAMS.items()
    for line in program.text.splitlines()
    if line.startswith("def test_")
]


@pytest.mark.thorough
@pytest.mark.timeout(400)
@pytest.mark.parametrize(("title", "name"), TESTS, ids=[f"{title}-{name}" for title, name in TESTS])
def test_a_test_that_the_page_shows_passes(title: str, name: str, request: pytest.FixtureRequest) -> None:
    if "SparkSession" in PROGRAMS[title].text:
        request.getfixturevalue("spark")  # which the program then finds
    names: dict[str, Any] = {"__name__": title.removesuffix(".py")}
    exec(compile(PROGRAMS[title].text, title, "exec"), names)  # noqa: S102 - our own page

    test = names[name]
    test(**{one: request.getfixturevalue(FIXTURES.get(one, one)) for one in inspect.signature(test).parameters})


def test_the_page_shows_a_test_for_each_way() -> None:
    assert len(TESTS) >= len(PROGRAMS) >= 5
