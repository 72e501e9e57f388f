"""One right of a role taken away, and given again once the role has said what it misses.

`TakenAway` gives the right from a thread of its own as soon as an error, a line of the log or the output of a command
has named it: what the role waits for goes on then, or what was refused is done again.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TypeVar

from pyspark.errors import PySparkException
from rights_table import Documented, covers, filled_in
from world import STEP_S, FailedCommandError, Undisturbed, World

from penstock.errors import PenstockError
from rights import Right, give, take

T = TypeVar("T")

#: Seconds within which a missing right must be said, from the first time that the broker refused it.
TOLD_S = 10.0
#: Seconds for which it is missing at least after it was said: what else breaks without it has the time to.
_GONE_S = 1.0
_LOOK_S = 1.0
#: Seconds between two tries of what was refused: a client may remember for a second that it was.
_AGAIN_S = 0.2

_COMMAND = re.compile(
    r"--allow-principal 'User:(?P<user>[^']+)' --operation (?P<operation>\w+) "
    r"--(?P<resource>topic|group|transactional-id) '(?P<name>[^']+)'(?P<prefix> --resource-pattern-type prefixed)?"
)


def named_in(text: str, user: str) -> set[Right]:
    """Return the rights that a text gives the commands for, beside the sentence that a user lacks them."""
    if f"User:{user} lacks the right" not in text:
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
    """Tell whether a right is a row of the table, or one of the names that the row stands for."""
    is_named = right.name.startswith(row.name) if row.is_prefix else right.name == row.name
    return right.resource == row.resource and right.operation == row.operation and is_named


class TakenAway(Undisturbed, logging.Handler):
    """A role without one right, which it is given once it has named it.

    The role runs on the test's thread, and watches the right from another one; what is said comes from any thread. The
    first that names the right counts. The events are set once.

    Args:
        world: where.
        table: all rights of the role.
        right: the one, with the world's names.
        while_it_runs: whether it is taken away when the role has done its work once, in place of from the start.
        is_needed: whether it is needed then.
    """

    def __init__(
        self, world: World, table: Documented, right: Right, *, while_it_runs: bool, is_needed: bool = True
    ) -> None:
        super().__init__(logging.WARNING)
        self._is_needed = is_needed
        self._world = world
        self._right = right
        self._while_it_runs = while_it_runs
        self._rows = {filled_in(row, world.names) for row in table.needed | table.optional}
        self._needed = {filled_in(row, world.names) for row in table.needed}
        # What contains DESCRIBE may be asked for in two steps: who cannot see a thing cannot tell what else it lacks.
        self._seeing = replace(right, operation="DESCRIBE")
        self._is_blind = threading.Event()
        self._said = threading.Event()
        self._ended = threading.Event()
        self.given = threading.Event()
        self._given_at = 0.0
        self._watching: threading.Thread | None = None
        #: What named the right first, and seconds from the first refusal.
        self.text = ""
        self.seconds = 0.0
        #: Rights that were named and that the table does not have.
        self.strange: set[Right] = set()
        #: Whether something was refused by an error, and done again.
        self.is_done_again = False

    def emit(self, record: logging.LogRecord) -> None:
        self.hear(record.getMessage())

    def hear(self, text: str) -> None:
        named = named_in(text, self._world.user.name)
        self.strange |= {one for one in named if not any(is_within(one, row) for row in (*self._rows, self._seeing))}
        if any(is_within(one, self._right) for one in named) and not self._said.is_set():
            self.text = text
            self._said.set()
        elif any(is_within(one, self._seeing) for one in named):
            self._is_blind.set()

    def is_told(self, text: str) -> bool:
        """Tell whether a text is about the right, or about that to see what it is held on, which it contains."""
        named = named_in(text, self._world.user.name)
        return any(is_within(one, row) for one in named for row in (self._right, self._seeing))

    @property
    def is_taken(self) -> bool:
        return self._watching is not None

    @property
    def is_said(self) -> bool:
        return self._said.is_set()

    def attempt(self, act: Callable[[], T]) -> T:
        """Do it, and again as long as the right is missing, or was a moment ago."""
        while True:
            try:
                return act()
            except (PenstockError, FailedCommandError, PySparkException) as error:
                if not self.is_taken or (self.given.is_set() and time.monotonic() > self._given_at + STEP_S):
                    raise
                self.hear(str(error))
                if not self.is_told(str(error)):
                    raise
                self.is_done_again = self.is_done_again or not self.given.is_set()
                self.given.wait(_AGAIN_S)

    def rounds(self, work: Callable[[], object]) -> None:
        """Work without the right until it was named and given, and once more."""
        work()
        if not self._while_it_runs:
            return
        take(self._world.broker, self._world.user, [self._right])
        if not self._is_needed:
            work()
            give(self._world.broker, self._world.user, [self._right])
            return
        self._watch()
        deadline = time.monotonic() + STEP_S
        while not self.given.is_set() and time.monotonic() < deadline:
            work()
        work()

    def is_refused(self) -> bool:
        """Tell whether the broker has refused what needs the right."""
        return any(not one.allowed and covers(self._right, one) for one in self._world.broker.asked(self._world.user))

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Take the right away, or get ready for it, while the role runs."""
        log = logging.getLogger("penstock")
        log.addHandler(self)
        kept = self._needed if self._while_it_runs else self._needed - {self._right}
        give(self._world.broker, self._world.user, kept)
        try:
            if not self._while_it_runs:
                self._watch()
            yield
        finally:
            self._ended.set()
            if self._watching is not None:
                self._watching.join()
            log.removeHandler(self)

    def _watch(self) -> None:
        self._watching = threading.Thread(target=self._give_when_said, name="gives-the-right")
        self._watching.start()

    def _give_when_said(self) -> None:
        # Parts begin by preparing, and some need a right only after a while: the time runs from the first refusal.
        since, was_refused = time.monotonic(), False
        while not self._said.wait(_LOOK_S) and not self._ended.is_set():
            if self._is_blind.is_set() and not self._said.is_set():
                give(self._world.broker, self._world.user, [self._seeing])
            now = time.monotonic()
            if was_refused and now - since > TOLD_S:
                break
            if not was_refused and now - since > TOLD_S / 2:
                was_refused = self.is_refused()
                since = now if was_refused else now - TOLD_S / 2
        self.seconds = time.monotonic() - since
        self._ended.wait(_GONE_S)
        give(self._world.broker, self._world.user, [self._right])
        self._given_at = time.monotonic()
        self.given.set()
