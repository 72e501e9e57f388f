"""Generates the tables of options in `docs/options.md` and `docs/spark.md`.

Names, their order, defaults, environment variables and "live" come from the code. Unit and meaning of an existing row
stay as they are on the page. The row of a new option gets them from the docstring; write them out on the page.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from enum import Enum
from functools import partial

import penstock
from penstock import spark_sink
from penstock.consumer import UNCHANGED
from penstock.settings.sources import OPTIONS, PREFIX, TYPE_NAMES
from penstock.transactions.stores.file.store import FileStore
from penstock.transactions.stores.sql.store import SqlStore

#: Calls in which None means unchanged.
CHANGES = {"RunningApp.change", "RunningApp.change_handler"}
#: The signature of each table, by its heading.
SIGNATURES: Mapping[str, Callable[..., object]] = {
    "App": penstock.App,
    "ReportSettings": penstock.ReportSettings,
    "CommandSettings": penstock.CommandSettings,
    "App.handler": penstock.App.handler,
    "RunningApp.change": penstock.RunningApp.change,
    "RunningApp.change_handler": penstock.RunningApp.change_handler,
    "retry": penstock.retry,
    "DeadLetterLimit": penstock.DeadLetterLimit,
    "Telemetry": penstock.Telemetry,
    "TransactionalProducer": penstock.TransactionalProducer,
    "TransactionalProducer.transaction": penstock.TransactionalProducer.transaction,
    "Coordinator": penstock.Coordinator,
    "SqlStore": SqlStore,
    "FileStore": FileStore,
    "App.sink": penstock.App.sink,
    "decode": spark_sink.decode,
    "start_sink": spark_sink.start_sink,
    "SqlSink": spark_sink.SqlSink,
    "DeadLetters": spark_sink.DeadLetters,
    "KafkaSink": spark_sink.KafkaSink,
    "DeltaSink": spark_sink.DeltaSink,
    "IcebergSink": spark_sink.IcebergSink,
    "HandlerSink": spark_sink.HandlerSink,
}
#: The method that changes options of a table while an app runs.
LIVE: Mapping[str, Callable[..., object]] = {
    "App": penstock.RunningApp.change,
    "App.handler": penstock.RunningApp.change_handler,
}
_UNITS = {"seconds": "s", "bytes": "bytes", "messages": "messages", "threads": "threads"}
_TABLE = re.compile(r"(?:^\|.*\n)+", re.MULTILINE)
_SETTINGS = "Settings outside of the code"


def with_tables(page: str) -> str:
    """Return a page with its tables of options updated from the code."""
    for heading, signature in SIGNATURES.items():
        page = _replaced(page, f"# `{heading}`\n", partial(_options, heading, signature))
    return _replaced(page, f"# {_SETTINGS}\n", lambda _: _settings())


def _replaced(page: str, heading: str, make: Callable[[str], str]) -> str:
    before, found, after = page.partition(heading)
    if not found:
        return page
    section = re.split(r"^#+ ", after, maxsplit=1, flags=re.MULTILINE)[0]
    made = _TABLE.sub(lambda table: make(table[0]), section, count=1)
    return before + found + made + after.removeprefix(section)


def listed(heading: str) -> list[inspect.Parameter]:
    """Return the options in a table."""
    parameters = inspect.signature(SIGNATURES[heading]).parameters.values()
    return [parameter for parameter in parameters if parameter.name != "self"]


def changeable(heading: str) -> set[str]:
    """Return the options in a table that may change while an app runs."""
    return set(inspect.signature(LIVE[heading]).parameters) - {"self", "topic"} if heading in LIVE else set()


def default_in_words(heading: str, parameter: inspect.Parameter) -> str | None:
    """Return the word that is shown instead of a default; None if its value is shown."""
    if parameter.default is inspect.Parameter.empty:
        return "required"
    if repr(parameter.default) == "<factory>":
        return "empty"
    if parameter.default is UNCHANGED or (heading in CHANGES and parameter.default is None):
        return "unchanged"
    return None


def _options(heading: str, signature: Callable[..., object], table: str) -> str:
    columns, _, *lines = [_cells(line) for line in table.splitlines()]
    existing = {row[0].strip("`"): dict(zip(columns, row, strict=True)) for row in lines}
    meanings = _docstring(signature)
    changes = changeable(heading)
    rows = []
    for parameter in listed(heading):
        name, meaning = parameter.name, meanings.get(parameter.name, "")
        unit = next((unit for word, unit in _UNITS.items() if word in meaning), "")
        row = {"unit": unit, "meaning": meaning} | existing.get(name, {})
        row |= {"option": f"`{name}`", "default": _default(heading, parameter)}
        row["environment"] = f"`{PREFIX}{name.upper()}`" if name in OPTIONS else ""
        row["live"] = "yes" if name in changes else "no"
        rows.append([row[column] for column in columns])
    return _drawn([columns, *rows])


def _settings() -> str:
    rows = [["key", "environment", "type"]]
    rows += [[f"`{name}`", f"`{PREFIX}{name.upper()}`", TYPE_NAMES[kind]] for name, kind in OPTIONS.items()]
    return _drawn(rows)


def _default(heading: str, parameter: inspect.Parameter) -> str:
    value = parameter.default
    plain = value.value if isinstance(value, Enum) else value
    shown = f'`"{plain}"`' if isinstance(plain, str) else f"`{plain!r}`"
    return default_in_words(heading, parameter) or shown


def _docstring(signature: Callable[..., object]) -> dict[str, str]:
    """Return the description of each argument in the docstring."""
    text = inspect.getdoc(signature) or ""
    arguments = re.split(r"\n\n(?=\S)", text.partition("Args:\n")[2])[0]
    found = re.findall(r"^    (\w+): (.*(?:\n {5,}.*)*)", arguments, re.MULTILINE)
    return {name: " ".join(meaning.split()).rstrip(".").replace("|", "\\|") for name, meaning in found}


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip().strip("|"))]


def _drawn(rows: list[list[str]]) -> str:
    head, *body = rows
    lines = ["".join(f"| {cell} " if cell else "| " for cell in row) + "|" for row in [head, *body]]
    return "\n".join([lines[0], "|" + "---|" * len(head), *lines[1:]]) + "\n"
