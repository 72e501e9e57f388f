"""The options table names every option, and none that is not there, with the defaults of the code."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path

import pytest
from confluent_kafka import OFFSET_BEGINNING

import penstock
from penstock.consumer import ConsumerSettings
from penstock.consumer.settings import _DEFAULTS, _OWNED
from penstock.errors import ConfigurationError
from penstock.settings.sources import OPTIONS

TEXT = "\n".join((Path(__file__).parents[2] / "docs" / name).read_text() for name in ("options.md", "spark.md"))


def rows(heading: str) -> dict[str, list[str]]:
    """Return the cells of the table below a heading, by the name in the first."""
    section = re.split(r"\n#+ ", TEXT.split(f"# {heading}\n", 1)[1], maxsplit=1)[0]
    table = [line.strip("| ").split("|") for line in section.splitlines() if line.startswith("| `")]
    cells = [[cell.strip() for cell in row] for row in table]
    return {row[0].strip("`"): row[1:] for row in cells}


def test_the_options_table_has_the_client_settings_that_penstock_sets() -> None:
    table = rows("Set by default")

    # Carried out by penstock: the client is not to choose a position by itself.
    assert table.pop("auto.offset.reset")[0] == '`"earliest"`'
    assert ConsumerSettings().offset_reset == OFFSET_BEGINNING
    assert {name: ast.literal_eval(cells[0].strip("`")) for name, cells in table.items()} == _DEFAULTS
    given = ConsumerSettings().client_config("group")
    own = ConsumerSettings(config=dict.fromkeys(table, "mine")).client_config("group")
    assert {name: given[name] for name in table} == _DEFAULTS
    assert {own[name] for name in table} == {"mine"}
    assert given["partition.assignment.strategy"] == "cooperative-sticky"
    assert "message.max.bytes=1000000000" in TEXT
    assert ConsumerSettings().producer_config() == {
        "message.max.bytes": 1_000_000_000,
        "compression.type": "zstd",
        "batch.size": 65_536,
        "enable.idempotence": True,
        "linger.ms": 5,
        "message.timeout.ms": 0,
        "topic.metadata.propagation.max.ms": 3_000,
        "topic.metadata.refresh.interval.ms": 10_000,
    }


def test_the_options_table_has_the_client_settings_that_are_refused() -> None:
    table = rows("Refused keys")

    assert set(table) == set(_OWNED)
    for name in table:
        with pytest.raises(ConfigurationError, match=re.escape(name)):
            ConsumerSettings(config={name: "mine"})


def test_a_setting_has_the_type_of_the_option_that_it_sets() -> None:
    parameters = inspect.signature(penstock.App).parameters
    names = {str: "str", int: "int", float: "float", bool: "bool", dict: "ClientConfig"}

    assert {name for name, kind in OPTIONS.items() if names[kind] not in str(parameters[name].annotation)} == set()


def test_the_table_of_the_environment_has_every_variable_that_is_read() -> None:
    source = Path(penstock.__file__).parent
    read = {name for path in source.rglob("*.py") for name in re.findall(r"\bPENSTOCK_[A-Z_]+[A-Z]", path.read_text())}
    inner = {
        "PENSTOCK_COMMAND_LINE",
        "PENSTOCK_MEMBERS",
    }  # a process sets them for those that it starts

    section = TEXT.split("# Environment\n", 1)[1].split("\n## ")[0]

    assert read - inner <= set(re.findall(r"PENSTOCK_[A-Z_]+[A-Z]", section))
