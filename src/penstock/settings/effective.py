"""`Effective`: the options of an app as they are in the end, each with where it stands."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from penstock.errors import ConfigurationError
from penstock.settings.sources import layers

#: The origin of what the code gives, or leaves at its default.
CODE = "the code"


@dataclass(frozen=True, slots=True)
class Effective:
    """Options by name. Passwords are among them, so `repr` shows only where they stand.

    Attributes:
        values: the options; of `config` each key is from the last place that names it.
        origins: where each stands that is not from the code; keys of `config` as `config['name']`.
    """

    values: Mapping[str, Any] = field(repr=False)
    origins: Mapping[str, str]

    def __getitem__(self, option: str) -> Any:
        return self.values[option]

    def without(self, *options: str) -> dict[str, Any]:
        """Return the values of all options but these."""
        return {name: value for name, value in self.values.items() if name not in options}

    def origin(self, option: str) -> str:
        """Return where an option stands."""
        return self.origins.get(option, CODE)

    @contextmanager
    def naming_origins(self) -> Iterator[None]:
        """Have an error about an option say where it stands, for whoever reads it looks into the code first."""
        try:
            yield
        except ConfigurationError as error:
            # Each check names its option first, as the first word or before what is wrong in it.
            origin = self.origins.get(str(error).partition(" ")[0])
            if origin is None:
                raise
            raise type(error)(f"{error} (from {origin})") from error


def effective(stated: Collection[str], **given: Any) -> Effective:
    """Return what the code gives, under what stands outside of it; `ConfigurationError` where that is wrong.

    Of a file that merely lies in the current folder only the options count that the code has not `stated`.
    """
    values, origins = dict(given), dict[str, str]()
    for layer in layers():
        for option, value in layer.values.items():
            if option == "config":
                found = {name: own for name, own in value.items() if not (layer.fills_in and name in given[option])}
                values[option] = {**values[option], **found}
                origins |= {f"config[{name!r}]": layer.origin(option) for name in found}
            elif not (layer.fills_in and option in stated):
                # True switches an object on that the code gives, which has arguments of its own.
                values[option] = (given.get(option) or True) if value is True else value
                origins[option] = layer.origin(option)
    return Effective(values, origins)


def outside() -> Mapping[str, Any]:
    """Return the options that are set outside of the code; of `config` each key by itself."""
    return effective((), config={}).values
