"""Passwords and payloads that must show nowhere while tests run against the secured broker, and where to look for them.

Every password of that broker holds `PASSWORD`, and messages that tests send there hold `PAYLOAD`. `watching` looks at
all that is logged meanwhile and at the files that are left in the end; `processes_that_show` is asked by each test.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest

#: With the number of this process, for others on the machine may run the same tests.
PASSWORD = f"canary-password-{os.getpid()}"
PAYLOAD = f"canary-payload-{os.getpid()}"
#: A value or a key of a message.
MESSAGE = PAYLOAD.encode()

#: Files that hold settings on purpose, and Kafka's own.
_SETTINGS = re.compile(r"(client|server)\.properties|\d{20}(-\d+)?\.(log|index|timeindex|snapshot|checkpoint)")
#: Parts of paths of what Spark writes about its work: neither passwords nor payloads belong there.
_OF_SPARK = ("checkpoint", "event")


class CanaryLog(logging.Handler):
    """Keeps what of the log shows a canary, stack traces included, with the test that ran then.

    Args:
        password: what must not show.
        payload: what must not show either.
    """

    def __init__(self, password: str, payload: str) -> None:
        super().__init__()
        self.canaries = password, payload
        self._shown: list[str] = []
        self.setFormatter(logging.Formatter())

    def emit(self, record: logging.LogRecord) -> None:
        text = self.format(record)
        if any(canary in text for canary in self.canaries):
            test = os.environ.get("PYTEST_CURRENT_TEST", "between tests")
            self._shown.append(f"{test}: {record.name} logs at {record.pathname}:{record.lineno}: {text}")

    def take(self) -> list[str]:
        """Return the findings since the last call."""
        # Other threads append meanwhile: what comes after the copy is left for the next time.
        taken = self._shown[:]
        del self._shown[: len(taken)]
        return taken


#: Of the secured broker; it hears only while that runs.
LOG = CanaryLog(PASSWORD, PAYLOAD)


@contextmanager
def watching(folder: Path, log: CanaryLog) -> Iterator[None]:
    """Let brokers make passwords with the canary, and fail in the end if a canary was logged or is in a file.

    Args:
        folder: where tests leave files; their folders have the names of the tests.
        log: hears what is logged meanwhile.
    """
    root = logging.getLogger()
    root.addHandler(log)
    maker = SimpleNamespace(token_urlsafe=lambda _bytes: f"{PASSWORD}-{secrets.token_hex(8)}")
    try:
        with mock.patch("penstock.devbroker.security.secrets", maker):
            yield
    finally:
        root.removeHandler(log)
    found = log.take() + files_that_show(folder, *log.canaries)
    if found:
        pytest.fail("a password or a payload shows:\n" + "\n".join(found), pytrace=False)


def processes_that_show(canary: str) -> list[str]:
    """Return the command lines, as `ps` shows them, that hold the text."""
    lines = []
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = file.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:  # that process has just ended
            continue
        if canary in line:
            lines.append(f"process {file.parent.name}: {line}")
    return lines


def files_that_show(folder: Path, password: str, payload: str) -> list[str]:
    """Return the files beneath a folder that hold the password, or, if Spark wrote them about its work, the payload.

    Stores, tables and logs of Kafka hold payload because that is what they are for.
    """
    found = []
    for parent, _, names in os.walk(folder):
        is_of_spark = any(name in part for part in Path(parent).relative_to(folder).parts for name in _OF_SPARK)
        canaries: Sequence[str] = (password, payload) if is_of_spark else (password,)
        for path in (Path(parent, name) for name in names if not _SETTINGS.fullmatch(name)):
            content = path.read_bytes() if path.is_file() else b""
            found += [f"{path} holds {canary}" for canary in canaries if canary.encode() in content]
    return found
