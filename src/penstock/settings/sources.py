"""Where settings stand outside of the code, read in the order in which they go before each other."""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from penstock.errors import ConfigurationError
from penstock.option_list import REMOVED
from penstock.options import nearest
from penstock.settings.model import OPTIONS, PREFIX, TYPE_NAMES, from_environment, typed

#: Names the file, instead of `penstock.toml` or `pyproject.toml` in the current folder.
SETTINGS_VARIABLE = "PENSTOCK_SETTINGS"
#: Names the table `[profiles.NAME]` of the file that goes before what stands outside of it.
PROFILE_VARIABLE = "PENSTOCK_PROFILE"
#: What the command line says, as JSON, for the app that this process or a child of it loads.
COMMAND_LINE_VARIABLE = "PENSTOCK_COMMAND_LINE"

_PROFILES = "profiles"
_FILE, _PROJECT = "penstock.toml", "pyproject.toml"
#: Likeness of two names from which on one is taken for the other, misspelt. Strict for variables, which others set too.
_ALIKE, _ALIKE_VARIABLE = 0.6, 0.85


@dataclass(frozen=True, slots=True)
class Layer:
    """What one place says. `repr` shows no value: passwords are among them."""

    #: Where it stands, for people.
    place: str
    values: Mapping[str, Any]
    #: Whether it counts only for what the program leaves out: nobody has named it, it lies in the current folder.
    fills_in: bool = False

    def __repr__(self) -> str:
        return f"Layer({self.place}: {', '.join(self.values)})"

    def origin(self, option: str) -> str:
        """Return where an option's value stands; a variable is named, as it is what there is to change."""
        return f"{PREFIX}{option.upper()}" if self.place == "the environment" else self.place


def option_names() -> tuple[str, ...]:
    """Return the names of the options that can be set outside of the code."""
    return tuple(OPTIONS)


def layers() -> list[Layer]:
    """Return what each place says, later ones going before earlier ones. `ConfigurationError` where one is wrong."""
    found = [*_from_file(), *_from_environment(), *_from_command_line()]
    return [replace(layer, values=_typed(layer)) for layer in found if layer.values]


def outside() -> dict[str, Any]:
    """Return the options that are set outside of the code; of `config` each key by itself."""
    merged: dict[str, Any] = {}
    for layer in layers():
        config = {**merged.get("config", {}), **layer.values.get("config", {})}
        merged |= layer.values
        if config:
            merged["config"] = config
    return merged


@contextmanager
def on_command_line(values: Mapping[str, Any]) -> Iterator[None]:
    """Have the command line say this, in this process and those that it starts meanwhile."""
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


def _from_file() -> Iterator[Layer]:
    profile = os.environ.get(PROFILE_VARIABLE)
    place, table = _table()
    profiles = table.pop(_PROFILES, {})
    if not isinstance(profiles, dict) or not all(isinstance(profile, dict) for profile in profiles.values()):
        raise ConfigurationError(f"{place}: {_PROFILES} must hold tables; write [{_PROFILES}.production]")
    yield Layer(place, table, fills_in=not os.environ.get(SETTINGS_VARIABLE))
    for name, settings in profiles.items():
        layer = Layer(f"{place}, profile {name}", settings)
        if name == profile:
            yield layer
        else:
            _typed(layer)  # a mistake shows before the day it is needed
    if profile and profile not in profiles:
        near = nearest(profile, profiles, _ALIKE)
        hint = f"did you mean {near}?" if near else f"write a table [{_PROFILES}.{profile}], or leave it out"
        raise ConfigurationError(f"{place} has no profile {profile}, which {PROFILE_VARIABLE} names; {hint}")


def _table() -> tuple[str, dict[str, Any]]:
    """Return the table with the settings, and where it stands: an empty one where there is none."""
    named = os.environ.get(SETTINGS_VARIABLE)
    if named:
        return named, _read(Path(named))
    if Path(_FILE).is_file():
        return _FILE, _read(Path(_FILE))
    if Path(_PROJECT).is_file():
        return f"{_PROJECT} [tool.penstock]", _of_project(_read(Path(_PROJECT)), _PROJECT)
    return f"{_FILE}, which is not there,", {}


def _read(path: Path) -> dict[str, Any]:
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        # Not chained: what tomllib says may quote the line.
        raise ConfigurationError(f"{path} is no TOML; correct it ({_where(error)})") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(
            f"{path} cannot be read: {type(error).__name__}; correct {SETTINGS_VARIABLE}"
        ) from error
    return _of_project(found, str(path)) if path.name == _PROJECT and os.environ.get(SETTINGS_VARIABLE) else found


def _where(error: tomllib.TOMLDecodeError) -> str:
    said = str(error)
    return said[said.rfind("(") :].strip("()") if said.endswith(")") else "at its end"


def _of_project(found: Mapping[str, Any], place: str) -> dict[str, Any]:
    table = found.get("tool", {}).get("penstock", {})
    if not isinstance(table, dict):
        raise ConfigurationError(f"{place}: tool.penstock must be a table; write [tool.penstock]")
    return dict(table)


def _from_environment() -> Iterator[Layer]:
    for name in os.environ:
        option = name.removeprefix(PREFIX).lower()
        if name.startswith(PREFIX) and option in REMOVED:
            raise ConfigurationError(f"{name} is no setting any more: {REMOVED[option]}")
        if name.startswith(PREFIX) and option not in OPTIONS and (near := nearest(option, OPTIONS, _ALIKE_VARIABLE)):
            raise ConfigurationError(f"{name} is no setting; did you mean {PREFIX}{near.upper()}?")
    yield Layer("the environment", from_environment())


def _from_command_line() -> Iterator[Layer]:
    if text := os.environ.get(COMMAND_LINE_VARIABLE):
        yield Layer("the command line", json.loads(text))


def _typed(layer: Layer) -> dict[str, Any]:
    """Return the values with the types of their options; `ConfigurationError` that names the first wrong one."""
    return {option: _value(layer, option, value) for option, value in layer.values.items()}


def _value(layer: Layer, option: str, value: object) -> Any:
    if option in REMOVED:
        raise ConfigurationError(f"{layer.place}: {option} is no setting any more: {REMOVED[option]}")
    if option not in OPTIONS:
        near = nearest(option, OPTIONS, _ALIKE)
        known = f"did you mean {near}?" if near else f"settings are {', '.join(OPTIONS)}"
        raise ConfigurationError(f"{layer.place}: {option} is no setting; {known}")
    if isinstance(value, dict):
        for name, setting in value.items():
            if not isinstance(setting, str | bool | int | float):
                raise ConfigurationError(
                    f"{layer.origin(option)}: {option}[{name!r}] is wrong: "
                    "it should be text, a number, true or false; correct it there"
                )
    try:
        return typed(option, value)
    except ConfigurationError:
        raise
    except (KeyError, TypeError, ValueError):
        # Not chained: what Python says may quote the value.
        raise ConfigurationError(
            f"{layer.origin(option)}: {option} is wrong; it takes: {TYPE_NAMES[OPTIONS[option]]}"
        ) from None
