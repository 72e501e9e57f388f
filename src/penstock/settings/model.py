"""The options of an app that can be set outside of its code, with their types.

Objects (`telemetry`, `middlewares`, `dead_letter_limit`) and the name, which says what the app is, stay in the code.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, Final

from penstock.settings.text import client_settings_text

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

#: How people and tables name a type.
TYPE_NAMES: Final[Mapping[type, str]] = {
    str: "text",
    int: "whole number",
    float: "number",
    bool: "true or false",
    dict: "table",
}
_TRUTHS = dict.fromkeys(("1", "true", "yes", "on"), True) | dict.fromkeys(("0", "false", "no", "off"), False)
#: Reads a type from text, as the environment and the command line give it.
_FROM_TEXT: Mapping[type, Callable[[str], Any]] = {
    str: str,
    int: int,
    float: float,
    bool: lambda text: _TRUTHS[text.strip().lower()],
    dict: lambda text: client_settings_text(text, f"{PREFIX}CONFIG"),
}


def typed(option: str, value: object) -> Any:
    """Return a value with the type of its option; an error of Python where it has another and is no text of it."""
    kind = OPTIONS[option]
    if isinstance(value, str):
        return _FROM_TEXT[kind](value)
    # Not isinstance: for Python a bool is an int, but `workers = true` is a mistake.
    if type(value) is kind or (kind is float and type(value) is int):
        return value
    raise TypeError


def from_environment() -> dict[str, str]:
    """Return what the environment says."""
    variables = {option: f"{PREFIX}{option.upper()}" for option in OPTIONS}
    return {option: os.environ[name] for option, name in variables.items() if name in os.environ}
