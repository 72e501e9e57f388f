"""What a request for an action may say: each parameter by its type, and nothing else. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.errors import ConfigurationError

#: Characters of a text, and entries of a list.
_TEXT = 500
_MOST_ENTRIES = 200
_MOST_NUMBER = 1 << 63
_BARS = {"dry_run"}


class ParameterError(ConfigurationError):
    """A parameter of an action is missing or wrong."""


class Parameters:
    """The parameters of one request. Each is taken by a method that names it; `end` refuses what was not taken."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        self._given = given
        self._taken = set(_BARS)
        #: Those that were taken, as the audit has them.
        self.told: dict[str, Any] = {}

    def text(self, name: str) -> str:
        """Return a text that must be there."""
        value = self._get(name)
        if not isinstance(value, str) or not 0 < len(value) <= _TEXT:
            raise ParameterError(f"{name} must be a text of 1 to {_TEXT} characters")
        return value

    def text_or_none(self, name: str) -> str | None:
        """Return a text, or None where there is none."""
        return None if self._get(name) is None else self.text(name)

    def number(self, name: str) -> int:
        """Return a number from 0 on that must be there."""
        value = self._get(name)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < _MOST_NUMBER:
            raise ParameterError(f"{name} must be a number from 0 on")
        return value

    def number_or_none(self, name: str) -> int | None:
        """Return a number, or None where there is none."""
        return None if self._get(name) is None else self.number(name)

    def flag(self, name: str) -> bool:
        """Return true or false; false where nothing is said."""
        value = self._get(name)
        if value is not None and not isinstance(value, bool):
            raise ParameterError(f"{name} must be true or false")
        return bool(value)

    def texts(self, name: str) -> list[str] | None:
        """Return a list of texts, or None where there is none."""
        value = self._get(name)
        if value is None:
            return None
        is_good = isinstance(value, list) and all(isinstance(item, str) and 0 < len(item) <= _TEXT for item in value)
        if not is_good or not 0 < len(value) <= _MOST_ENTRIES:
            raise ParameterError(f"{name} must be a list of 1 to {_MOST_ENTRIES} texts")
        return list(value)

    def choice(self, name: str, known: tuple[str, ...]) -> str:
        """Return one of these texts."""
        value = self.text(name)
        if value not in known:
            raise ParameterError(f"{name} must be one of {', '.join(known)}")
        return value

    def end(self) -> None:
        """Refuse parameters that nobody has taken: one that is misspelt must not count as left out."""
        if left := sorted(str(name)[:_TEXT] for name in self._given if name not in self._taken):
            raise ParameterError(f"{left[0]!r} is no parameter of this action")

    def _get(self, name: str) -> Any:
        self._taken.add(name)
        value = self._given.get(name)
        if value is not None:
            self.told[name] = value
        return value
