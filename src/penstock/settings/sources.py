"""The sources of settings outside the code, in order of precedence, lowest first.

Objects (`telemetry`, `middlewares`, `dead_letter_limit`) and the app's name stay in the code.
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from penstock.errors import ConfigurationError
from penstock.option_list import REMOVED
from penstock.options import nearest
from penstock.settings.text import client_settings_text

#: Names the settings file, instead of `penstock.toml` or `pyproject.toml` in the current folder.
SETTINGS_VARIABLE = "PENSTOCK_SETTINGS"
#: Names the table `[profiles.NAME]` of the file, which overrides the rest of the file.
PROFILE_VARIABLE = "PENSTOCK_PROFILE"
#: The options of the command line, as JSON, for the app that this process or a child of it loads.
COMMAND_LINE_VARIABLE = "PENSTOCK_COMMAND_LINE"
PREFIX: Final = "PENSTOCK_"

#: The type of each option.
OPTIONS: Final[Mapping[str, type]] = {
    "bootstrap_servers": str,
    "workers": int,
    "max_concurrency": int,
    "config": dict,
    "coordinator": bool,
    "prefix": str,
    "pinned": bool,
    "max_in_flight": int,
    "max_in_flight_bytes": int,
    "commit_interval": float,
    "stop_timeout": float,
    "revoke_timeout": float,
    "stall_after": float,
    "time_limit": float,
    "exactly_once": bool,
    "transaction_interval": float,
    "report": bool,
    "commands": bool,
}

#: Names of types for errors and tables.
TYPE_NAMES: Final[Mapping[type, str]] = {
    str: "text",
    int: "whole number",
    float: "number",
    bool: "true or false",
    dict: "table",
}
_TRUTHS = dict.fromkeys(("1", "true", "yes", "on"), True) | dict.fromkeys(("0", "false", "no", "off"), False)
#: Parsers for texts of the environment and the command line.
_FROM_TEXT: Final[Mapping[type, Callable[[str], Any]]] = {
    str: str,
    int: int,
    float: float,
    bool: lambda text: _TRUTHS[text.strip().lower()],
    dict: lambda text: client_settings_text(text, f"{PREFIX}CONFIG"),
}

_PROFILES = "profiles"
_FILE, _PROJECT = "penstock.toml", "pyproject.toml"
#: Least similarity for a misspelt name. Stricter for variables, because other programs set some, too.
_ALIKE, _ALIKE_VARIABLE = 0.6, 0.85


@dataclass(frozen=True, slots=True)
class Layer:
    """The settings of one source."""

    #: The source, as text for users.
    place: str
    #: The settings; they may include passwords.
    values: Mapping[str, Any] = field(repr=False)
    #: Whether it counts only for options that the program leaves out: a file that merely lies in the current folder.
    fills_in: bool = False

    def origin(self, option: str) -> str:
        """Return the origin of an option for users: the variable's name, or the place."""
        return f"{PREFIX}{option.upper()}" if self.place == "the environment" else self.place

    def typed(self) -> Layer:
        """Return it with values of the options' types; `ConfigurationError` names the first wrong one."""
        return replace(self, values={option: _typed(self, option, value) for option, value in self.values.items()})


def layers() -> list[Layer]:
    """Return the settings of all sources; later ones override earlier ones. `ConfigurationError` if one is wrong."""
    command_line = Layer("the command line", json.loads(os.environ.get(COMMAND_LINE_VARIABLE) or "{}"))
    return [*_from_file(), _from_environment().typed(), command_line.typed()]


@contextmanager
def on_command_line(values: Mapping[str, Any]) -> Iterator[None]:
    """Set the options of the command line within the block, for this process and its children."""
    before = os.environ.get(COMMAND_LINE_VARIABLE)
    if values:
        os.environ[COMMAND_LINE_VARIABLE] = json.dumps(dict(values))
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(COMMAND_LINE_VARIABLE, None)
        else:
            os.environ[COMMAND_LINE_VARIABLE] = before


def _from_file() -> list[Layer]:
    """Return the settings of the file, followed by those of its chosen profile."""
    place, table = _table()
    tables = table.pop(_PROFILES, {})
    if not isinstance(tables, dict) or not all(isinstance(profile, dict) for profile in tables.values()):
        raise ConfigurationError(f"{place}: {_PROFILES} must hold tables; write [{_PROFILES}.production]")
    own = Layer(place, table, fills_in=not os.environ.get(SETTINGS_VARIABLE)).typed()
    # All profiles are checked: a mistake shows before the profile is needed.
    profiles = {name: Layer(f"{place}, profile {name}", settings).typed() for name, settings in tables.items()}
    chosen = os.environ.get(PROFILE_VARIABLE)
    if chosen and chosen not in profiles:
        near = nearest(chosen, profiles, _ALIKE)
        hint = f"did you mean {near}?" if near else f"write a table [{_PROFILES}.{chosen}], or leave it out"
        raise ConfigurationError(f"{place} has no profile {chosen}, which {PROFILE_VARIABLE} names; {hint}")
    return [own, profiles[chosen]] if chosen else [own]


def _table() -> tuple[str, dict[str, Any]]:
    """Return the place of the settings and their table, which is empty if there is no file."""
    named = os.environ.get(SETTINGS_VARIABLE)
    there = [Path(named)] if named else [path for path in (Path(_FILE), Path(_PROJECT)) if path.is_file()]
    if not there:
        return f"{_FILE}, which is not there,", {}
    path = there[0]
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        # Not chained, and only the position: the text of tomllib may quote the line.
        where = re.search(r"at [^()]*(?=\)$)", str(error))
        raise ConfigurationError(f"{path} is no TOML; correct it ({where[0] if where else 'at its end'})") from None
    except (OSError, UnicodeDecodeError) as error:
        remedy = f"correct the file, or {SETTINGS_VARIABLE}" if named else "make it readable, and write it in UTF-8"
        raise ConfigurationError(f"{path} cannot be read: {type(error).__name__}; {remedy}") from error
    if path.name != _PROJECT:
        return str(path), found
    table = found.get("tool", {}).get("penstock", {})
    if not isinstance(table, dict):
        raise ConfigurationError(f"{path}: tool.penstock must be a table; write [tool.penstock]")
    return f"{path} [tool.penstock]", dict(table)


def _from_environment() -> Layer:
    values = {}
    for name, value in os.environ.items():
        option = name.removeprefix(PREFIX).lower()
        if not name.startswith(PREFIX):
            continue
        if option in REMOVED:
            raise ConfigurationError(f"{name} is no setting any more: {REMOVED[option]}")
        if option in OPTIONS:
            values[option] = value
        elif near := nearest(option, OPTIONS, _ALIKE_VARIABLE):
            raise ConfigurationError(f"{name} is no setting; did you mean {PREFIX}{near.upper()}?")
    return Layer("the environment", values)


def _typed(layer: Layer, option: str, value: object) -> Any:
    """Return a value with the type of its option."""
    if option not in OPTIONS:
        near = nearest(option, OPTIONS, _ALIKE)
        text = f"did you mean {near}?" if near else f"settings are {', '.join(OPTIONS)}"
        text = f" any more: {REMOVED[option]}" if option in REMOVED else f"; {text}"
        raise ConfigurationError(f"{layer.place}: {option} is no setting{text}")
    if isinstance(value, dict):
        for name, setting in value.items():
            if not isinstance(setting, str | bool | int | float):
                raise ConfigurationError(
                    f"{layer.origin(option)}: {option}[{name!r}] is wrong: "
                    "it should be text, a number, true or false; correct it there"
                )
    kind = OPTIONS[option]
    try:
        if isinstance(value, str):
            return _FROM_TEXT[kind](value)
    except ConfigurationError:
        raise
    except (KeyError, ValueError):
        pass
    else:
        # Not isinstance: in Python a bool is an int, but `workers = true` is a mistake.
        if type(value) is kind or (kind is float and type(value) is int):
            return value
    # Not chained to the error above: Python's text may quote the value.
    raise ConfigurationError(f"{layer.origin(option)}: {option} is wrong; it takes: {TYPE_NAMES[kind]}")
