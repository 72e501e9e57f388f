"""A role that begins without any permission, gets each one that it names, and then loses some while it runs."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar

from pyspark.errors import PySparkException
from rights_table import WITH_DESCRIBE, Documented, filled_in
from world import STEP_S, FailedCommandError, Undisturbed, World

from penstock.errors import PenstockError
from rights import Right, give, take

T = TypeVar("T")

#: Seconds between two tries of what was refused: a client may remember for a second that it was.
_RETRY_S = 0.2

_COMMAND = re.compile(
    r"--allow-principal 'User:(?P<user>[^']+)' --operation (?P<operation>\w+) "
    r"--(?P<resource>topic|group|transactional-id) '(?P<name>[^']+)'(?P<prefix> --resource-pattern-type prefixed)?"
)


def named_in(text: str, user: str) -> set[Right]:
    """Return the permissions whose commands are in a text that says that the user lacks them."""
    if f"User:{user} lacks the permission" not in text:
        return set()
    return {
        Right(
            found["resource"].replace("-", "_"),
            found["name"],
            re.sub(r"(?<=[a-z])(?=[A-Z])", "_", found["operation"]).upper(),
            found["prefix"] is not None,
        )
        for found in _COMMAND.finditer(text)
        if found["user"] == user
    }


def is_within(right: Right, row: Right) -> bool:
    """Return whether a permission is a row of the table, or one of the names of that row."""
    is_named = right.name.startswith(row.name) if row.is_prefix else right.name == row.name
    return right.resource == row.resource and right.operation == row.operation and is_named


class LeastRights(Undisturbed, logging.Handler):
    """Gives a role only permissions that it names and that the table has.

    The role runs on the test's thread and names what it lacks in errors, in the log and in the output of commands, from
    any thread. The one thread of `_pool` gives, and alone writes the fields.

    Args:
        world: where.
        table: all permissions of the role.
        taken: those that are taken away in turn while it runs.
        only_at_start: those that it then does its work without.
        creates: whether it also needs what the table has of CREATE.
    """

    def __init__(
        self,
        world: World,
        table: Documented,
        taken: Iterable[Right] = (),
        only_at_start: Iterable[Right] = (),
        *,
        creates: bool = False,
    ) -> None:
        super().__init__(logging.WARNING)
        self._world = world
        self._taken = [filled_in(row, world.names) for row in taken]
        self._only_at_start = {filled_in(row, world.names) for row in only_at_start}
        self._optional = {filled_in(row, world.names) for row in table.optional}
        self._needed = {filled_in(row, world.names) for row in table.needed}
        if creates:
            self._needed |= {row for row in self._optional if row.operation == "CREATE"}
        #: Who cannot see a thing cannot tell what else it lacks there, and names DESCRIBE first.
        self._seeing = {replace(row, operation="DESCRIBE") for row in self._needed if row.operation in WITH_DESCRIBE}
        self._pool = ThreadPoolExecutor(1, "gives-rights")
        self._given: list[Future[None]] = []
        self._progress = threading.Event()
        self._last_given = time.monotonic()
        self._held: set[Right] = set()
        #: Rows of the table that the role has named, and what it named that is none.
        self.named: set[Right] = set()
        self.strange: set[Right] = set()

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Read the role's messages while it runs, and require that in the end it has named the whole table."""
        log = logging.getLogger("penstock")
        log.addHandler(self)
        try:
            yield
        finally:
            log.removeHandler(self)
            self._pool.shutdown()
        self._settle()
        assert self.strange == set(), "the table does not have this"
        assert self._needed - self.named == set(), "this was never named"

    def emit(self, record: logging.LogRecord) -> None:
        self.hear(record.getMessage())

    def hear(self, text: str) -> None:
        for right in sorted(named_in(text, self._world.user.name)):
            self._given.append(self._pool.submit(self._give_named, right))

    def attempt(self, act: Callable[[], T]) -> T:
        """Do it, and again as long as something is missing, or was a moment ago."""
        while True:
            try:
                return act()
            except (PenstockError, FailedCommandError, PySparkException) as error:
                if not named_in(str(error), self._world.user.name):
                    raise
                self._progress.clear()
                self.hear(str(error))
                self._settle()
                if not self._progress.wait(_RETRY_S) and self._is_stuck():
                    raise

    def rounds(self, work: Callable[[], object]) -> None:
        """Work with all that it needs; then without each that is taken away, until it was named and given back."""
        work()
        for right in self._taken:
            self._settle()
            self._pool.submit(self._take, right).result()
            if right in self._only_at_start:
                work()
                self._pool.submit(self._give_named, right).result()
                continue
            deadline = time.monotonic() + STEP_S
            while right not in self._held:
                assert time.monotonic() < deadline, f"{right} was never named"
                self._progress.clear()
                work()
                self._progress.wait(_RETRY_S)
            work()

    def _settle(self) -> None:
        """Wait until all permissions named so far are given."""
        for given in self._given[:]:
            given.result()

    def _is_stuck(self) -> bool:
        """Return whether the role complains about a permission that it has had for long."""
        return time.monotonic() > self._last_given + STEP_S

    def _take(self, right: Right) -> None:
        """Give it the permissions of the table, except one row."""
        take(self._world.broker, self._world.user, [right, *self._seeing.intersection(self._held - self._needed)])
        self._held &= self._needed - {right}

    def _give_named(self, named: Right) -> None:
        for rows in (self._needed, self._seeing, self._optional):
            if row := next((row for row in sorted(rows) if is_within(named, row)), None):
                break
        else:
            self.strange.add(named)
            return
        self.named.add(row)
        if row not in self._held and row not in self._optional - self._needed:
            give(self._world.broker, self._world.user, [row])
            self._held.add(row)
            self._last_given = time.monotonic()
            self._progress.set()
