"""`order="half"`: the transactions of a group's ordering key stand in line, in the order their halves were stored.

Pure. Only the head of a line may be published; one that is rolled back or discarded leaves the line from wherever it
stands, for nothing of it becomes visible. Transactions without an ordering key are in no line.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from penstock.transactions.core.pending import Pending
from penstock.transactions.wire.half import Line


class KeyOrder:
    """The lines of one half partition. Not thread-safe: its coordinator's thread drives it.

    Halves are added in the order of their offsets, which is the order in which they were sent; `sort` is for those
    that are not.
    """

    def __init__(self) -> None:
        # By group and key, then by transaction id. There are no empty lines.
        self._lines: dict[Line, OrderedDict[str, Pending]] = {}
        self._count = 0

    def add(self, line: Line, pending: Pending) -> None:
        """Let a transaction stand in line, behind all that came before."""
        self._count += 1
        self._lines.setdefault(line, OrderedDict())[pending.half.transaction_id] = pending

    def head(self, line: Line) -> Pending | None:
        """Return who is in front, or None when nobody waits."""
        waiting = self._lines.get(line)
        return next(iter(waiting.values())) if waiting else None

    def line_of(self, line: Line) -> Iterable[Pending]:
        """Return all of a line, the head first."""
        return self._lines[line].values() if line in self._lines else ()

    def remove(self, line: Line, pending: Pending) -> Pending | None:
        """Take a transaction out; return the new head where it was the head itself."""
        waiting = self._lines[line]
        was_head = next(iter(waiting)) == pending.half.transaction_id
        del waiting[pending.half.transaction_id]
        self._count -= 1
        if not waiting:
            del self._lines[line]
            return None
        return next(iter(waiting.values())) if was_head else None

    def sort(self, line: Line) -> None:
        """Let all of a line stand in the order of their offsets: one was added whose half had been read before."""
        waiting = self._lines[line]
        self._lines[line] = OrderedDict(sorted(waiting.items(), key=lambda item: item[1].offset))

    @property
    def behind(self) -> int:
        """How many transactions stand behind another one."""
        return self._count - len(self._lines)
