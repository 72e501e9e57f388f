"""What a transactional writer raises, apart from `UnknownEndError`."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.clients.rights import Right
from penstock.errors import PenstockError


class IdLostError(PenstockError):
    """The broker cannot end what was left open under a transactional id; all of that is settled, take another id."""


class NotOpenedError(PenstockError):
    """The producer cannot start now: try again. `rights` are missing for it, if that is the reason."""

    def __init__(self, text: str, rights: Sequence[Right] = ()) -> None:
        super().__init__(text)
        self.rights = rights


class GivenUpError(PenstockError):
    """The owner of a writer gave its transaction up before its end had begun: it comes to nothing."""
