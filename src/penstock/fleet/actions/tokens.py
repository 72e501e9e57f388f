"""The token that actions need: where it stands, how it is compared, and how wrong ones are slowed.

The comparison takes the same time whatever is wrong. A wrong token is answered after a delay that grows with each
failure of its client, and while so many of them wait, further ones of that client are turned away unread: nobody who
guesses can keep others out.
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

#: Holds the token of the dashboard.
TOKEN_VARIABLE = "PENSTOCK_DASHBOARD_TOKEN"  # noqa: S105 - the name of a variable
#: Characters of a token at least.
LEAST_TOKEN = 16

#: Seconds that the first wrong token waits for its answer, and any of them at most.
_FIRST_DELAY_S = 1.0
_MAX_DELAY_S = 30.0
#: Wrong tokens of one client that may wait.
_MOST_WAITING = 4
#: Seconds without a wrong token after which a client is as one that never sent one; clients that are remembered.
_FORGOTTEN_S = 300.0
_REMEMBERED = 10_000


def dashboard_token(file: Path | None = None) -> str | None:
    """Return the token that a file holds, or else the environment; None where neither does: no actions then.

    `ConfigurationError` where the file cannot be read or the token is too short. Never take it from a command line,
    which others on the machine can read.
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
    """Compares tokens. For one thread, that of the event loop.

    Args:
        token: the right one.
        clock: seconds that only rise.
    """

    def __init__(self, token: str, clock: Callable[[], float] = time.monotonic) -> None:
        # Of equal length whatever is given: the comparison would tell the length of the token.
        self._digest = _digest(token)
        self._clock = clock
        self._clients: OrderedDict[str, _Client] = OrderedDict()
        #: Wrong tokens so far.
        self.wrong = 0

    def judge(self, client: str, given: str) -> float | None:
        """Return 0 for the right token, and for a wrong one the seconds that its answer waits: call `answered` then.

        None: it was not looked at, for too many wrong ones of this client wait for their answer.
        """
        now = self._clock()
        known = self._clients.get(client)
        if known is not None and not known.waiting and now - known.last_s > _FORGOTTEN_S:
            del self._clients[client]
            known = None
        if known is not None and known.waiting >= _MOST_WAITING:
            return None
        if hmac.compare_digest(_digest(given), self._digest):
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
        """Note that a wrong token has its answer."""
        if (known := self._clients.get(client)) is not None:
            known.waiting = max(0, known.waiting - 1)


def _digest(token: str) -> bytes:
    return hashlib.sha256(token.encode(errors="replace")).digest()
