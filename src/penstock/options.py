"""Checks of settings: one function for each rule. Each error names the option, its value and the remedy.

The settings themselves are frozen dataclasses of the engines.
"""

from __future__ import annotations

import difflib
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from enum import Enum
from typing import Any, TypeVar

from penstock.errors import ConfigurationError

EnumT = TypeVar("EnumT", bound=Enum)
SettingsT = TypeVar("SettingsT")

#: Client configuration: librdkafka's keys as they are.
ClientConfig = Mapping[str, Any]

#: The longest time in seconds: the Kafka client counts milliseconds in 31 bits.
LONGEST_S = 2_000_000
#: The largest count: Python takes no larger one as a length.
_LARGEST = (1 << 63) - 1

#: The environment variable with the number of a process of `penstock run --processes N`, from 1 on.
PROCESS_VARIABLE = "PENSTOCK_PROCESS"
#: The variable with the name of this run, unique among hosts. With their numbers it names the group's members.
MEMBERS_VARIABLE = "PENSTOCK_MEMBERS"


def is_classic(config: ClientConfig) -> bool:
    """Tell whether a consumer joins its group by the classic protocol."""
    # The client ignores upper and lower case.
    return str(config.get("group.protocol", "classic")).lower() == "classic"


def instance_id(config: ClientConfig) -> str | None:
    """Return the `group.instance.id` of this process; None: its member has no fixed name.

    Members of `penstock run --processes` share one configuration. With the same id they would fence each other.
    """
    number, given = os.environ.get(PROCESS_VARIABLE), config.get("group.instance.id")
    if given:
        return f"{given}-{number}" if number else str(given)
    # With the newer protocol, named members cannot leave the group, and a killed one keeps its successor out until its
    # session ends (librdkafka 2.16).
    members = os.environ.get(MEMBERS_VARIABLE) if is_classic(config) else None
    return f"{members}-{number}" if members and number else None


def positive(option: str, value: float) -> None:
    """Raise `ConfigurationError` unless the value is a number above zero."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        raise ConfigurationError(f"{option} must be a number above zero, but is {value!r}; give it a positive value")


def seconds(option: str, value: float) -> None:
    """Raise `ConfigurationError` unless the value is above zero and at most `LONGEST_S`."""
    positive(option, value)
    _within_longest(option, value)


def seconds_or_zero(option: str, value: float) -> None:
    """Raise `ConfigurationError` unless the value is at least zero and at most `LONGEST_S`."""
    not_negative(option, value)
    _within_longest(option, value)


def _within_longest(option: str, value: float) -> None:
    if value > LONGEST_S:
        raise ConfigurationError(f"{option} must be at most {LONGEST_S:,} seconds (23 days), but is {value!r}")


def a_telemetry(value: object) -> None:
    """Raise `ConfigurationError` unless the value is None or a `penstock.Telemetry`."""
    # This does not load telemetry: without its module no such object exists.
    module = sys.modules.get("penstock.telemetry.settings")
    if value is not None and (module is None or not isinstance(value, module.Telemetry)):
        raise ConfigurationError(
            f"telemetry must be a Telemetry, but is {value!r}; give penstock.Telemetry(), or leave it out for none"
        )


def not_negative(option: str, value: float) -> None:
    """Raise `ConfigurationError` unless the value is a number of at least zero."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
        raise ConfigurationError(f"{option} must be zero or more, but is {value!r}; give it a value of at least 0")


def a_boolean(option: str, value: object) -> None:
    """Raise `ConfigurationError` unless the value is True or False."""
    if not isinstance(value, bool):
        raise ConfigurationError(f"{option} must be True or False, but is {value!r}")


def positive_int(option: str, value: int, most: int = _LARGEST) -> None:
    """Raise `ConfigurationError` unless the value is a whole number from one to `most`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigurationError(f"{option} must be a whole number of at least 1, but is {value!r}")
    if value > most:
        raise ConfigurationError(f"{option} must be at most {most:,}, but is {value}")


def is_client_text(value: str) -> bool:
    """Tell whether the Kafka client accepts a text. Other texts end the process in places, or are cut at a NUL."""
    try:
        return b"\0" not in value.encode()
    except UnicodeEncodeError:
        return False


def not_empty(option: str, value: str) -> None:
    """Raise `ConfigurationError` unless the value is a string with at least one visible character, and without NUL."""
    if not isinstance(value, str) or not value.strip():
        raise ConfigurationError(f"{option} must be a name, but is {value!r}; give it a string that is not empty")
    if not is_client_text(value):
        raise ConfigurationError(f"{option} must be a name in UTF-8, without a NUL character, but is {value!r}")


def printable_ascii(option: str, value: object) -> None:
    """Raise `ConfigurationError` unless the client library puts this name of a member or a group into transactions."""
    if not (str(value).isascii() and str(value).isprintable()):
        raise ConfigurationError(
            f"{option} must be printable ASCII with exactly_once, but is {value!r}: the Kafka client refuses it in "
            "transactions; give another name"
        )


def a_callable(option: str, value: Callable[..., Any]) -> None:
    """Raise `ConfigurationError` unless the value can be called."""
    if not callable(value):
        raise ConfigurationError(
            f"{option} must be a function or another callable, but is a {type(value).__name__}; "
            "pass the function itself, not its result or its name"
        )


def a_plain_function(option: str, value: Callable[..., Any]) -> None:
    """Raise `ConfigurationError` unless the value can be called and returns no coroutine."""
    a_callable(option, value)
    if inspect.iscoroutinefunction(value) or inspect.iscoroutinefunction(type(value).__call__):
        raise ConfigurationError(
            f"{option} must be a plain function, but is an async one, whose answer is a coroutine, not a state; it "
            "runs on a thread of its own: call asyncio.run() in it"
        )


def choice(option: str, value: str | EnumT, kind: type[EnumT]) -> EnumT:
    """Return the member of `kind` with that value, or raise `ConfigurationError` that lists the choices."""
    try:
        return kind(value)
    except ValueError:
        choices = ", ".join(repr(member.value) for member in kind)
        raise ConfigurationError(f"{option} must be one of {choices}, but is {value!r}") from None


def one_of(option: str, value: str, *allowed: str) -> None:
    """Raise `ConfigurationError` unless the value is one of these words."""
    if value not in allowed:
        words = ", ".join(map(repr, allowed[:-1]))
        raise ConfigurationError(f"{option} must be {words} or {allowed[-1]!r}, but is {value!r}")


def switched(option: str, value: bool | SettingsT, kind: type[SettingsT]) -> SettingsT | None:
    """Return the settings of an option that takes True, False or settings of `kind`; None for False."""
    if value is True:
        return kind()
    if value is False:
        return None
    if not isinstance(value, kind):
        raise ConfigurationError(
            f"{option} must be True, False or penstock.{kind.__name__}(...), but is a {type(value).__name__}"
        )
    return value


def reserved(config: ClientConfig, owned: Mapping[str, str], owner: str) -> None:
    """Raise `ConfigurationError` for a setting that belongs to `owner`; `owned` has the remedies."""
    for key in config:
        if key in owned:
            raise ConfigurationError(f"config[{key!r}] belongs to {owner}: {owned[key]}")


def names(option: str, value: str | Iterable[str]) -> tuple[str, ...]:
    """Return one name or several as a tuple without repeats, or raise `ConfigurationError`."""
    given = (value,) if isinstance(value, str) else tuple(value)
    if not given:
        raise ConfigurationError(f"{option} must name at least one topic, but is empty")
    for name in given:
        not_empty(option, name)
    return tuple(dict.fromkeys(given))


def nearest(name: str, known: Iterable[str], likeness: float) -> str | None:
    """Return the known name that a wrong name probably means; None if none is as similar as `likeness`, from 0 to 1."""
    return next(iter(difflib.get_close_matches(name, list(known), 1, likeness)), None)
