"""Every Python block of the pages runs, and the commands that they show have the options they are shown with.

A block runs with the names that its page takes for granted (`app`, `producer`, a database). One that cannot says why,
in the line before it: `<!-- not run: why -->`; what it names of penstock is looked up all the same.
"""

from __future__ import annotations

import ast
import asyncio
import importlib
import inspect
import json
import re
import shlex
import sys
import tomllib
import types
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, Self
from unittest.mock import MagicMock

import pytest
import typer
from confluent_kafka.schema_registry import SchemaRegistryClient
from confluent_kafka.schema_registry.avro import AvroDeserializer, AvroSerializer
from pages import PAGES, ROOT, Block, blocks
from pyspark.sql import Column, DataFrame, SparkSession

import penstock
from penstock.cli.frame import frame
from penstock.clients.topics import TopicSpec, ensure_topics
from penstock.spark_sink import KafkaSink, SqlSink
from penstock.transactions import FileStore

#: Pages whose programs run as a whole, by tests of their own.
WHOLE = {"tutorial.md", "testing.md", *(page.name for page in (ROOT / "docs" / "jobs").iterdir())}
PYTHON = [one for page in PAGES if page.name not in WHOLE for one in blocks(page) if one.language == "python"]
NOT_RUN = re.compile(r"not run: \w.{9,}")
#: What names on the pages stand for, where they are used and not made.
KINDS = {"app": penstock.App, "producer": penstock.TransactionalProducer, "running": penstock.RunningApp}
SCHEMA = '{"type": "record", "name": "Invoice", "fields": [{"name": "order", "type": "int"}]}'


class Database:
    """The database of an example."""

    def __init__(self, _url: str) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass


@pytest.fixture
def given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[dict[str, Any]]:
    """The names that pages use without making them. Producers store halves in a folder, and nothing publishes them."""
    monkeypatch.chdir(tmp_path)
    servers = "127.0.0.1:1"
    if "transaction(" in request.getfixturevalue("block").text:  # targets must exist
        servers = request.getfixturevalue("broker").bootstrap_servers
        specs = [TopicSpec(topic, 1, {}) for topic in ("orders", "invoices")]
        ensure_topics(request.getfixturevalue("admin"), specs)
    make: Callable[..., Any] = penstock.TransactionalProducer

    def stored(group: str, *, bootstrap_servers: str | None = None, **options: Any) -> Any:
        del bootstrap_servers
        store = options.pop("store", None) or FileStore(str(tmp_path / group), bootstrap_servers=servers)
        return make(group, store=store, **options)

    signer = types.ModuleType("aws_msk_iam_sasl_signer")
    signer.MSKAuthTokenProvider = MagicMock(generate_auth_token=lambda _region: ("token", 1))  # type: ignore[attr-defined] # it is made here
    monkeypatch.setitem(sys.modules, signer.__name__, signer)
    monkeypatch.setattr(penstock, "TransactionalProducer", stored)
    app = penstock.App("app", bootstrap_servers="127.0.0.1:1")
    with stored("service") as producer:
        yield {
            "penstock": penstock,
            "app": app,
            "producer": producer,
            "db": MagicMock(),
            "Database": Database,
            "url": "",
            "seen_before": bool,
            "total": len,
            "local_transaction": lambda _tx: None,
            "local_coroutine": _coroutine,
            "Iterator": Iterator,
            "Column": Column,
            "DataFrame": DataFrame,
            "KafkaSink": KafkaSink,
            "REGISTRY": {},
            "cache": cache,
            "SparkSession": SparkSession,
            "SqlSink": SqlSink,
            "SchemaRegistryClient": SchemaRegistryClient,
            "AvroDeserializer": AvroDeserializer,
            "AvroSerializer": AvroSerializer,
            "INVOICE": SCHEMA,
        }


async def _coroutine(_tx: object) -> None:
    pass


@pytest.mark.parametrize(
    "block",
    [
        pytest.param(block, marks=[pytest.mark.thorough] * ("DevBroker(" in block.text), id=block.place)
        for block in PYTHON
    ],
)
def test_a_block_of_python_runs(block: Block, given: dict[str, Any]) -> None:
    if NOT_RUN.match(block.mark) or is_an_example(block):
        return
    if "app.handler_sink" in block.text:
        given["app"].handler("orders")(print)  # what a sink of handlers is made of

    code = compile(block.text, block.place, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    done = eval(code, given)  # noqa: S307 - our own pages

    if inspect.isawaitable(done):
        asyncio.run(_awaited(done))


async def _awaited(done: Any) -> None:
    await done


def is_an_example(block: Block) -> bool:
    """Return whether a block is a program of `examples`, which has its own test."""
    return any(block.text.strip() in one.read_text() for one in (ROOT / "examples").glob("*.py"))


@pytest.mark.parametrize("block", PYTHON, ids=lambda block: block.place)
def test_what_a_block_names_of_penstock_exists_and_takes_what_it_is_given(block: Block) -> None:
    tree = ast.parse(block.text)
    wrong = []

    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("penstock"):
            home = importlib.import_module(node.module or "")
            wrong += [f"{node.module}.{one.name}" for one in node.names if not hasattr(home, one.name)]
        elif isinstance(node, ast.Attribute) and ast.unparse(node).startswith("penstock.") and found(node) is None:
            wrong.append(ast.unparse(node))
        elif isinstance(node, ast.Call) and (called := found(node.func)) is not None:
            wrong += [f"{ast.unparse(node.func)}({one}=)" for one in unknown_options(node, called)]

    assert wrong == []


def found(node: ast.expr) -> Any:
    """Return the object of `penstock.a.b` or `app.a`; None if it is not penstock's."""
    first, *names = ast.unparse(node).split(".")
    here: Any = penstock if first == "penstock" else KINDS.get(first)
    if here is None or (first in KINDS and not names):
        return None
    for name in names:
        try:
            here = getattr(here, name, None) or importlib.import_module(f"{here.__name__}.{name}")
        except (ImportError, AttributeError):
            return None
    return here


def unknown_options(call: ast.Call, called: Any) -> list[str]:
    """Return the names of arguments that a function does not take."""
    parameters = inspect.signature(called).parameters.values()
    if any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters):
        return []
    names = {one.name for one in parameters}
    return [one.arg for one in call.keywords if one.arg is not None and one.arg not in names]


def commands(page: Path) -> list[str]:
    """Return the commands of penstock that a page shows, in blocks and in its text."""
    text = page.read_text()
    shown = re.findall(r"^\$ (?:\.venv/bin/)?(penstock [^\n]+)", text, re.MULTILINE)
    outside = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    return shown + [" ".join(one.split()) for one in re.findall(r"`(penstock [a-z][^`]*)`", outside)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_options_of_commands_that_a_page_shows_exist(page: Path) -> None:
    wrong = [command for command in commands(page) if not has_its_options(command)]

    assert wrong == []


@cache
def command_line() -> Any:
    """Return the command line; making it takes a while."""
    return typer.main.get_command(frame())


def has_its_options(command: str) -> bool:
    """Return whether a command and all its shown options exist."""
    here = command_line()
    known = {name for one in here.params for name in [*one.opts, *one.secondary_opts]}
    known |= {"--help", "-h", "--install-completion"}
    words = shlex.split(re.split(r" [#>|] ?", command, maxsplit=1)[0].removesuffix("&"))[1:]
    for word in words:
        if word in getattr(here, "commands", {}):
            here = here.commands[word]
            known |= {name for one in here.params for name in [*one.opts, *one.secondary_opts]}
    asked = [word.partition("=")[0].rstrip(",.") for word in words if word.startswith("--")]
    return all(word in known for word in asked) and (here.name != "penstock" or bool(asked))


DATA = [one for page in PAGES for one in blocks(page) if one.language in {"toml", "json"}]


@pytest.mark.parametrize("block", DATA, ids=lambda block: block.place)
def test_a_block_of_data_can_be_read(block: Block) -> None:
    read = tomllib.loads(block.text) if block.language == "toml" else json.loads(block.text)

    assert read
