"""`order="half"`: the transactions of each ordering key stand in line, in the order in which their halves were stored.

Pure. Only the head of a line may be published; one that is rolled back or discarded leaves the line from wherever it
stands, for nothing of it becomes visible. Transactions without an ordering key are in no line.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from penstock.transactions.pending import Pending


class KeyOrder:
    """The lines of one half partition. Not thread-safe: its coordinator's thread drives it.

    Halves are added in the order of their offsets, which is the order in which they were sent.
    """

    def __init__(self) -> None:
        # By ordering key, then by transaction id. A key without transactions has no line.
        self._lines: dict[bytes, OrderedDict[str, Pending]] = {}
        self._standing = 0

    def add(self, key: bytes, pending: Pending) -> None:
        """Let a transaction stand in line, behind all that came before."""
        self._standing += 1
        self._lines.setdefault(key, OrderedDict())[pending.half.transaction_id] = pending

    def head(self, key: bytes) -> Pending | None:
        """Return who is in front, or None when nobody waits."""
        line = self._lines.get(key)
        return next(iter(line.values())) if line else None

    def line(self, key: bytes) -> Iterable[Pending]:
        """Return all of a line, the head first."""
        return self._lines[key].values() if key in self._lines else ()

    def remove(self, key: bytes, pending: Pending) -> Pending | None:
        """Take a transaction out; return the new head where it was the head itself."""
        line = self._lines[key]
        was_head = next(iter(line)) == pending.half.transaction_id
        del line[pending.half.transaction_id]
        self._standing -= 1
        if not line:
            del self._lines[key]
            return None
        return next(iter(line.values())) if was_head else None

    @property
    def behind(self) -> int:
        """How many transactions stand behind another one."""
        return self._standing - len(self._lines)


__all__ = ["KeyOrder"]
