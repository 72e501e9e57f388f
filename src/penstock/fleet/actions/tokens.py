"""The token of actions: its source, its comparison, and the delay of answers to wrong tokens.

The comparison takes constant time. The answer to a wrong token is delayed, longer with each failure of its client. A
client with several delayed answers gets no further comparison. Other clients do not wait for a client that guesses.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import ConfigurationError
from penstock.fleet_member import LEAST_TOKEN

#: Holds the token of the dashboard.
TOKEN_VARIABLE = "PENSTOCK_DASHBOARD_TOKEN"  # noqa: S105 - the name of a variable
#: The delay of the first wrong token's answer, and the largest delay, in seconds.
_FIRST_DELAY_S = 1.0
_MAX_DELAY_S = 30.0
#: The number of delayed answers of one client.
_MOST_WAITING = 4
#: Seconds without a wrong token after which the failures of a client are forgotten; the number of clients remembered.
_FORGOTTEN_S = 300.0
_REMEMBERED = 10_000


def dashboard_token(file: Path | None = None) -> str | None:
    """Return the token in a file, or without a file the one in the environment; None if there is none.

    `ConfigurationError` if the file cannot be read or the token is too short. Never take a token from the command line:
    other users of the machine can read it.
    """
    if file is None:
        token, place = os.environ.get(TOKEN_VARIABLE, ""), TOKEN_VARIABLE
    else:
        try:
            token, place = file.read_text(encoding="utf-8").strip(), str(file)
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigurationError(
                f"{file} cannot be read: {type(error).__name__}; name the file of a token"
            ) from error
    if not token and file is None:
        return None
    if len(token) < LEAST_TOKEN or not token.isprintable():
        raise ConfigurationError(
            f"the token in {place} must have {LEAST_TOKEN} printable characters at least; make one with "
            "`openssl rand -hex 32`"
        )
    return token


@dataclass(slots=True)
class _Client:
    failures: int = 0
    last_s: float = 0.0
    waiting: int = 0


class TokenGuard:
    """Compares tokens, and decides on the delay of answers. For the thread of the event loop.

    Args:
        token: the right token.
        clock: a monotonic clock, in seconds.
    """

    def __init__(self, token: str, clock: Callable[[], float] = time.monotonic) -> None:
        # Digests have equal length, so the time of the comparison does not show the length of the token.
        self._digest = _digest(token)
        self._clock = clock
        self._clients: OrderedDict[str, _Client] = OrderedDict()
        #: The number of wrong tokens.
        self.wrong = 0

    def judge(self, client: str, token: str) -> float | None:
        """Return 0 for the right token, else the delay of the answer in seconds. After the delay call `answered`.

        None if the token was not compared: too many answers to this client are delayed.
        """
        now = self._clock()
        known = self._clients.get(client)
        if known is not None and not known.waiting and now - known.last_s > _FORGOTTEN_S:
            del self._clients[client]
            known = None
        if known is not None and known.waiting >= _MOST_WAITING:
            return None
        if hmac.compare_digest(_digest(token), self._digest):
            return 0.0
        known = known or _Client()
        known.failures += 1
        known.last_s = now
        known.waiting += 1
        self.wrong += 1
        self._clients[client] = known
        self._clients.move_to_end(client)
        while len(self._clients) > _REMEMBERED:
            self._clients.popitem(last=False)
        return min(_MAX_DELAY_S, _FIRST_DELAY_S * 2.0 ** min(known.failures - 1, 10))

    def answered(self, client: str) -> None:
        """Note that a delayed answer was sent."""
        if (known := self._clients.get(client)) is not None:
            known.waiting = max(0, known.waiting - 1)


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode(errors="replace")).digest()
