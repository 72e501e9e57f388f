"""`Effective`: the final options of an app, each with its origin."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from penstock.errors import ConfigurationError
from penstock.settings.sources import layers

#: The origin of options that the code states or leaves at their defaults.
CODE = "the code"


@dataclass(frozen=True, slots=True)
class Effective:
    """Options by name. They may include passwords, so `repr` shows only the origins.

    Attributes:
        values: the options; each key of `config` comes from the last place that names it.
        origins: origins of options that are not from the code; keys of `config` appear as `config['name']`.
    """

    values: Mapping[str, Any] = field(repr=False)
    origins: Mapping[str, str]

    def __getitem__(self, option: str) -> Any:
        return self.values[option]

    def without(self, *options: str) -> dict[str, Any]:
        """Return the values of all options but these."""
        return {name: value for name, value in self.values.items() if name not in options}

    def origin(self, option: str) -> str:
        """Return the origin of an option."""
        return self.origins.get(option, CODE)

    @contextmanager
    def naming_origins(self) -> Iterator[None]:
        """Add the origin of an option to an error about it: readers look into the code first."""
        try:
            yield
        except ConfigurationError as error:
            # Every error begins with the name of its option.
            origin = self.origins.get(str(error).partition(" ")[0])
            if origin is None:
                raise
            raise type(error)(f"{error} (from {origin})") from error


def effective(stated: Collection[str], **given: Any) -> Effective:
    """Return the options of the code, overridden by settings from outside; `ConfigurationError` if those are wrong.

    A file that merely lies in the current folder counts only for options that the code has not `stated`.
    """
    values, origins = dict(given), dict[str, str]()
    for layer in layers():
        for option, value in layer.values.items():
            if option == "config":
                found = {name: own for name, own in value.items() if not (layer.fills_in and name in given[option])}
                values[option] = {**values[option], **found}
                origins |= {f"config[{name!r}]": layer.origin(option) for name in found}
            elif not (layer.fills_in and option in stated):
                # True switches on an object that the code gives, with its own arguments.
                values[option] = (given.get(option) or True) if value is True else value
                origins[option] = layer.origin(option)
    return Effective(values, origins)


def outside() -> Mapping[str, Any]:
    """Return the options that are set outside the code; keys of `config` are merged one by one."""
    return effective((), config={}).values
