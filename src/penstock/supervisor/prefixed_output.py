"""What a member process prints, passed on line by line with its number before each."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from typing import IO

_READ_BYTES = 65_536
#: A line longer than this is printed in parts.
_MAX_LINE_BYTES = 65_536
#: Reads that empty any pipe; a process that a member left behind may go on writing.
_MAX_READS_AT_END = 64


class PrefixedOutput:
    """One stream of a member, printed to the descriptor `sink`. For one thread; reading never waits."""

    def __init__(self, prefix: bytes, source: IO[bytes], sink: int) -> None:
        self.source = source
        self._prefix = prefix
        self._sink = sink
        self._pending = b""
        os.set_blocking(source.fileno(), False)

    def pump(self) -> bool:
        """Print what is there; return False at the end of the stream."""
        return self._receive() != b""

    def finish(self) -> None:
        """Print what is left of a member that ended, and do not wait for processes that it started."""
        for _ in range(_MAX_READS_AT_END):
            if not self._receive():
                break
        if self._pending:
            self._print([self._pending])
        self.source.close()

    def _receive(self) -> bytes | None:
        """Take what is there; None when that is nothing now, empty at the end."""
        try:
            received = os.read(self.source.fileno(), _READ_BYTES)
        except BlockingIOError:
            return None
        *lines, self._pending = (self._pending + received).split(b"\n")
        if len(self._pending) > _MAX_LINE_BYTES:
            lines.append(self._pending)
            self._pending = b""
        self._print(lines)
        return received

    def _print(self, lines: Sequence[bytes]) -> None:
        rest = b"".join(self._prefix + line + b"\n" for line in lines)
        # A reader that went away costs the output, not the work. Past Python's buffers: they would keep the error.
        with contextlib.suppress(OSError):
            while rest:
                rest = rest[os.write(self._sink, rest) :]
