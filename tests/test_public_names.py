"""The public names are what `__all__` says, and importing penstock loads no engine."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import TypeVar

import pytest

import penstock
from penstock import transactions

#: The packages of all names that users pass, get or catch.
PACKAGES = (
    "penstock",
    "penstock.consumer",
    "penstock.devbroker",
    "penstock.errors",
    "penstock.message",
    "penstock.spark_sink",
    "penstock.telemetry",
    "penstock.testing",
    "penstock.transactions",
)
#: Classes that users get and never make: their constructors are not for users.
GIVEN = {"ConsumerTelemetry", "Message", "MissingRightError", "RunningApp", "Transaction"}
#: Classes whose users call only the constructor: an engine calls the rest.
ENGINES = {"FileStore", "Simulation", "SqlStore", "TestBroker"}
#: Names that only an engine or a broker in memory uses.
INNER = {
    "Cluster",
    "MemoryConsumer",
    "MemoryProducer",
    "RelayedStore",
    "SendSpans",
    "Store",
    "Submission",
    "TestTransaction",
}
#: Base classes of the app: their public methods are the app's.
REGISTRIES = {"HandlerRegistry", "SinkRegistry"}
PUBLIC = {name for package in PACKAGES for name in importlib.import_module(package).__all__}


def test_every_public_name_can_be_had() -> None:
    missing = [name for name in penstock.__all__ if not hasattr(penstock, name)]

    assert missing == []
    assert set(penstock.__all__) <= set(dir(penstock))


def test_importing_penstock_loads_no_engine() -> None:
    program = "import sys, penstock; print(sorted(n for n in sys.modules if n.startswith(('penstock', 'confluent'))))"

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "['penstock']"


def test_an_app_a_producer_and_a_coordinator_load_nothing_of_an_extra_and_what_reports_no_web_server() -> None:
    heavy = (
        "pyspark",
        "pyarrow",
        "starlette",
        "uvicorn",
        "sqlalchemy",
        "typer",
        "rich",
        "opentelemetry",
        "penstock.fleet",
    )
    program = (
        "import sys, penstock; penstock.App, penstock.TransactionalProducer, penstock.Coordinator\n"
        f"print([name for name in {heavy} if name in sys.modules])\n"
        "import penstock.fleet.reports.reporter, penstock.fleet.commands.listener\n"
        "print([name for name in ('starlette', 'uvicorn', 'typer') if name in sys.modules])"
    )

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert done.stdout.split() == ["[]", "[]"]


def signatures(package: str) -> Iterator[tuple[str, str, set[str]]]:
    """Yield the place of each public signature or field of a package, its module, and the names that it speaks of."""
    home = importlib.import_module(package)
    for name in home.__all__:
        found = getattr(home, name)
        if not (inspect.isclass(found) or inspect.isfunction(found)) or not found.__module__.startswith("penstock"):
            continue
        parents = [one for one in getattr(found, "__mro__", ()) if one.__name__ in REGISTRIES]
        for owner in [found, *parents]:
            node = written(owner)
            for part in parts_of(node, name):
                where = f"{package}.{name}" if part is node else f"{package}.{name}.{called(part)}"
                yield where, owner.__module__, {*named_in(part), *raised_by(part)}


def written(found: Callable[..., object]) -> ast.stmt:
    """Return where a class or a function is defined."""
    tree = ast.parse(Path(inspect.getfile(inspect.unwrap(found))).read_text())
    return next(one for one in tree.body if getattr(one, "name", None) == found.__name__)


def parts_of(node: ast.stmt, name: str) -> list[ast.stmt]:
    """Return the public signatures and fields of a public name."""
    if not isinstance(node, ast.ClassDef):
        return [node]
    if name in INNER:
        return []
    parts = [one for one in node.body if is_public(one)]
    if name in GIVEN:
        return [part for part in parts if called(part) != "__init__"]
    if name in ENGINES:
        return [part for part in parts if called(part) == "__init__"]
    return parts


def is_public(node: ast.stmt) -> bool:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return not node.name.startswith("_") or node.name in {"__init__", "__call__"}
    return isinstance(node, ast.AnnAssign) and not called(node).startswith("_")


def called(node: ast.AST) -> str:
    return str(getattr(node, "name", None) or getattr(getattr(node, "target", None), "id", "?"))


def named_in(node: ast.stmt) -> Iterator[str]:
    """Yield the names in the annotations of a function or a field."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        given = node.args
        annotated = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
        annotations = [one.annotation for one in annotated if one is not None]
        annotations.append(node.returns)
    else:
        annotations = [getattr(node, "annotation", None)]
    for annotation in annotations:
        for one in ast.walk(annotation) if annotation is not None else ():
            if isinstance(one, ast.Name):
                yield one.id


def raised_by(node: ast.AST) -> Iterator[str]:
    """Yield the exceptions that a docstring names."""
    text = ast.get_docstring(node) if isinstance(node, ast.FunctionDef | ast.ClassDef) else None
    for section in (text or "").split("Raises:\n")[1:]:
        yield from re.findall(r"^    (\w+): ", section, re.MULTILINE)


def names_of_penstock(module: str) -> set[str]:
    """Return the names that a module defines or imports from penstock, without type variables."""
    home = importlib.import_module(module)
    tree = ast.parse(Path(inspect.getfile(home)).read_text())
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("penstock"):
            found |= {name.asname or name.name for name in node.names}
    for statement in tree.body:
        if isinstance(statement, ast.ClassDef):
            found.add(statement.name)
        elif isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name):
            found.add(statement.targets[0].id)
    return {name for name in found if not isinstance(getattr(home, name, None), TypeVar)}


@cache
def own_errors() -> set[str]:
    """Return the names of all exceptions that penstock raises."""
    return {
        node.name
        for path in Path(penstock.__file__).parent.rglob("*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.ClassDef) and node.name.endswith("Error")
    }


@pytest.mark.parametrize("package", PACKAGES)
def test_what_public_signatures_speak_of_can_be_imported_from_where_users_import(package: str) -> None:
    hidden = {
        name: where
        for where, module, names in signatures(package)
        for name in names & {*names_of_penstock(module), *own_errors()}
        if name not in PUBLIC
    }

    assert hidden == {}


@pytest.mark.parametrize("package", [penstock, transactions])
def test_no_module_has_a_public_name_which_it_would_hide_once_it_is_imported(package: ModuleType) -> None:
    assert not {module.name for module in pkgutil.iter_modules(package.__path__)} & set(package.__all__)
