"""Sessions of PostgreSQL: each wait for the server is bounded on the client side, and unusable sessions are dropped.

A frozen server, or one behind a network that swallows packets, answers nothing. Its own time-outs do not help, and its
kernel acknowledges sent packets. A demoted server answers, and refuses every write.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Generator, Mapping
from typing import Any

import psycopg
import sqlalchemy as sa

from penstock.errors import ConfigurationError

_THRESHOLD = "prepare_threshold"
#: Seconds that the request to cancel a statement may take.
_CANCEL_BUDGET_S = 1.0


class _BoundedConnection(psycopg.Connection[Any]):
    """A session that waits at most `limit_s` seconds for each answer, and is closed if none comes."""

    limit_s = math.inf
    # An older client library would wait for the answer to the request without a limit.
    _may_cancel = psycopg.capabilities.has_cancel_safe()

    def commit(self) -> None:
        """Commit. It is never cancelled: the server would no longer wait for its synchronous standbys."""
        may_cancel, self._may_cancel = self._may_cancel, False
        try:
            super().commit()
        finally:
            self._may_cancel = may_cancel

    def wait(self, gen: Any, *args: Any, **more: Any) -> Any:
        """Wait as psycopg does: it resumes the generator every 0.1 s."""
        return super().wait(self._bounded(gen), *args, **more)

    def _bounded(self, gen: Generator[Any, Any, Any]) -> Generator[Any, Any, Any]:
        deadline = time.monotonic() + self.limit_s
        try:
            wanted = next(gen)
            while True:
                ready = yield wanted
                if not ready and time.monotonic() >= deadline:
                    if self._may_cancel:
                        # A server does not notice a closed session while its statement waits for a lock: each try would
                        # leave one more session there.
                        with contextlib.suppress(psycopg.Error):
                            self.cancel_safe(timeout=_CANCEL_BUDGET_S)
                    self.pgconn.finish()
                    raise psycopg.OperationalError(
                        f"the database did not answer within {self.limit_s:g} s, as if a lock is held or the server "
                        "hangs; the session is dropped"
                    )
                wanted = gen.send(ready)
        except StopIteration as end:
            return end.value


def make_engine(url: sa.URL, limit_s: float, connect_args: Mapping[str, Any], **options: Any) -> sa.Engine:
    """Return an engine whose statements take at most `limit_s` seconds.

    Statements are not prepared on the server, because poolers in transaction mode refuse that. With
    `?prepare_threshold=` in the address they are prepared after so many uses. Raises `ConfigurationError` if it is not
    a number.
    """
    threshold = _threshold_of(url)
    engine = sa.create_engine(
        url.difference_update_query([_THRESHOLD]),
        connect_args={**connect_args, _THRESHOLD: threshold},
        **options,
    )

    def connect(_dialect: object, _record: object, args: list[Any], settings: dict[str, Any]) -> _BoundedConnection:
        connection = _BoundedConnection.connect(*args, **settings)
        connection.limit_s = limit_s
        return connection

    sa.event.listen(engine, "do_connect", connect)
    return engine


def _threshold_of(url: sa.URL) -> int | None:
    value = url.query.get(_THRESHOLD)
    if value is None:
        return None
    if not isinstance(value, str) or not value.isdecimal():
        raise ConfigurationError(f"{_THRESHOLD} in the url must be a whole number of uses, but is {value!r}")
    return int(value)
