"""Generates the page of commands, `docs/commands.md`, from the command line."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import typer

from penstock.cli.frame import frame
from penstock.cli.output import DEBUG_VARIABLE
from penstock.settings.sources import PREFIX, PROFILE_VARIABLE

_WORDS = {str: "text", int: "whole number", float: "number", Path: "path"}
#: Environment variables that replace an option.
_VARIABLES = {
    "--bootstrap-servers": f"{PREFIX}BOOTSTRAP_SERVERS",
    "--config-file": f"{PREFIX}CONFIG",
    "--debug": DEBUG_VARIABLE,
    "--profile": PROFILE_VARIABLE,
}
_HEAD = """\
# Commands

<!-- Made by docs/tools/generate.py from the command line; a test holds it against the code. -->

All commands and options, as `penstock COMMAND --help` prints them. Their use, their output and their exit codes are in
[operation](operation.md). Addresses of brokers and settings of the Kafka clients can also come from the environment and
from a file: [options](options.md#connection-of-commands).
"""


def command_page() -> str:
    """Return the page."""
    return "\n".join([_HEAD, *_group(typer.main.get_command(frame()), "penstock")]).rstrip() + "\n"


def _group(command: Any, name: str) -> Iterator[str]:
    yield f"## `{name}`\n"
    yield _paragraphs(command.help)
    yield from _options(command)
    yield from _example(command)
    for subcommand in getattr(command, "commands", {}).values():
        yield from _group(subcommand, f"{name} {subcommand.name}")


def _options(command: Any) -> Iterator[str]:
    shown = [
        option for option in command.params if option.name not in {"help", "install_completion", "show_completion"}
    ]
    if not shown:
        return
    yield "| option | default | value | environment | meaning |"
    yield "|---|---|---|---|---|"
    for option in shown:
        names = ", ".join(f"`{name}`" for name in [*option.opts, *option.secondary_opts])
        if option.param_type_name == "argument":
            names = f"`{_value(option)}`"
        named = option.envvar or _VARIABLES.get(option.opts[0])
        variable = f"`{named}`" if named else ""
        cells = [names, _default(option), _kind(option), variable, _cell(option.help or "")]
        yield "".join(f"| {cell} " if cell else "| " for cell in cells) + "|"
    yield ""


def _kind(option: Any) -> str:
    if option.param_type_name == "argument":
        return "argument, several" if option.nargs == -1 else "argument"
    if getattr(option, "is_flag", False):
        return "flag"
    return f"`{_value(option)}`".replace("|", "\\|") + (", repeatable" if option.multiple else "")


def _value(option: Any) -> str:
    kind = option.type_descriptor.annotation
    if option.metavar:
        return str(option.metavar)
    if get_origin(kind) is Literal:
        return "|".join(get_args(kind))
    if kind is float and "seconds" in (option.help or "").lower():
        return "seconds"
    return _WORDS[(get_args(kind) or (kind,))[0]]


def _default(option: Any) -> str:
    if option.required:
        return "required"
    default = option.default() if callable(option.default) else option.default
    if default is None or default is False or default in ((), []):
        return ""
    return f"`{getattr(default, 'value', default)}`"


def _paragraphs(text: str | None) -> str:
    return re.sub(r"(?m)^ +", "", (text or "").split("\f")[0]).strip() + "\n"


def _example(command: Any) -> Iterator[str]:
    if command.epilog and "Example: " in command.epilog:
        yield f"```console\n$ {command.epilog.split('Example: ')[1]}\n```\n"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
