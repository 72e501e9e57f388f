"""What files that start penstock must hold: a stage of an image, a command with its options, an app that is there."""

from __future__ import annotations

import json
import os
import runpy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import typer
from dockerfile_parse import DockerfileParser

from penstock import App
from penstock.cli.frame import frame


def instructions(dockerfile: Path) -> list[tuple[str, str]]:
    """Return the instructions of a Dockerfile with their values, in order."""
    with dockerfile.open("rb") as file:
        return [
            (found["instruction"], found["value"])
            for found in DockerfileParser(fileobj=file).structure
            if found["instruction"] != "COMMENT"
        ]


def stage(dockerfile: Path, name: str | None = None) -> dict[str, str]:
    """Return the last value of each instruction in a stage, by default the last one, and in those it is made from."""
    stages: dict[str, dict[str, str]] = {}
    current = ""
    for instruction, value in instructions(dockerfile):
        if instruction == "FROM":
            base, _, current = value.partition(" AS ")
            stages[current] = dict(stages.get(base, {}))
        elif stages:
            stages[current][instruction] = value
    return stages[current if name is None else name]


def command_of(dockerfile: Path) -> list[str]:
    """Return the command of an image, without `penstock`, which must be its entrypoint in the exec form."""
    found = stage(dockerfile)
    assert json.loads(found["ENTRYPOINT"]) == ["penstock"], "a shell would keep signals to itself"
    arguments: list[str] = json.loads(found["CMD"])
    return arguments


def require_command(arguments: Sequence[str], environment: Mapping[str, str]) -> dict[str, Any]:
    """Return the options of a command of penstock, as the command line reads them; fails where one does not exist."""
    command: Any = typer.main.get_command(frame())
    context = command.make_context("penstock", list(arguments), resilient_parsing=True)
    left = list(arguments)
    with _within(environment):
        while hasattr(command, "commands"):
            name, command, left = command.resolve_command(context, left)
        params: dict[str, Any] = command.make_context(name, left, parent=context).params
    return params


def require_app(target: str, folder: Path, environment: Mapping[str, str]) -> App:
    """Return the app that MODULE:APP names in a folder; fails where the module has none."""
    module, _, attribute = target.partition(":")
    with _within(environment):
        app = runpy.run_path(str(folder / f"{module}.py"), run_name=module)[attribute]
    assert isinstance(app, App)
    return app


@contextmanager
def _within(environment: Mapping[str, str]) -> Iterator[None]:
    """Run the block in an environment that has no settings of penstock but these."""
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("PENSTOCK_")]:
            patch.delenv(name)
        for name, value in environment.items():
            patch.setenv(name, value)
        yield
