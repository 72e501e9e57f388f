"""The explain server: a running app answers `penstock explain` on a Unix socket in a private folder of the user.

Only the same user on the same machine can connect, because the folder belongs to that user alone. Each connection gets
the current answer as JSON and is closed. A request has no content, so there is nothing to validate. An app that cannot
serve logs that and runs on.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
import socketserver
import stat
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_log = logging.getLogger(__name__)

#: Time limit in seconds for a whole answer.
_TIMEOUT_S = 5.0
#: Seconds between two checks whether the app has ended. The end of the app waits for one check.
_STOP_POLL_S = 0.1
_SUFFIX = ".sock"


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer of one process, by its id; None if it did not come in time."""

    process: int
    content: dict[str, Any] | None


def folder() -> Path:
    """Return the folder of the sockets, which may not exist: in XDG_RUNTIME_DIR, else with the temporary files."""
    return Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()) / f"penstock-{os.getuid()}"


@contextmanager
def explain_server(answer: Callable[[], dict[str, Any]]) -> Iterator[None]:
    """Serve explanations while the block runs. Each connection calls `answer`, on its own thread."""
    try:
        server = _Server(_own_folder() / f"{os.getpid()}-{secrets.token_hex(2)}{_SUFFIX}", answer)
    except OSError as error:
        _log.warning("`penstock explain` will not reach this process: %s", error)
        yield
        return
    thread = threading.Thread(target=server.serve_forever, args=(_STOP_POLL_S,), name="penstock-explain", daemon=True)
    thread.start()
    try:
        yield
    finally:
        server.path.unlink(missing_ok=True)
        server.shutdown()
        server.server_close()


class _Server(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True

    def __init__(self, path: Path, answer: Callable[[], dict[str, Any]]) -> None:
        self.path = path
        self.answer = answer
        # A client that finds the name expects an answer, so the socket gets its name once it listens.
        unnamed = path.with_suffix(".new")
        unnamed.unlink(missing_ok=True)
        super().__init__(str(unnamed), _Request)
        unnamed.replace(path)  # a former process with this id may have left its socket

    def handle_error(self, request: object, client_address: object) -> None:  # noqa: ARG002 - the base class's names
        # The client has gone away, or making the answer failed. The app runs on.
        _log.warning("`penstock explain` got no answer from this process", exc_info=True)


class _Request(socketserver.StreamRequestHandler):
    timeout = _TIMEOUT_S
    server: _Server

    def handle(self) -> None:
        self.wfile.write(json.dumps(self.server.answer()).encode())


def _own_folder() -> Path:
    """Return the folder, created if missing.

    Raises `OSError` if it cannot be created, or if other users may write to it: they could answer instead of this app.
    """
    path = folder()
    path.mkdir(mode=0o700, exist_ok=True)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise PermissionError(f"{path} is not a folder of this user's alone; remove it, or set XDG_RUNTIME_DIR")
    return path


def ask_all() -> list[Answer]:
    """Return the answers of all apps of this user, ordered by process. Remove the sockets of ended processes."""
    answers = []
    for path in sorted(folder().glob(f"*{_SUFFIX}"), key=lambda file: (len(file.name), file.name)):
        process = int(path.stem.partition("-")[0])
        with suppress(FileNotFoundError), socket.socket(socket.AF_UNIX) as client:
            client.settimeout(_TIMEOUT_S)
            try:
                client.connect(str(path))
                with client.makefile("rb") as whole:
                    answers.append(Answer(process, json.loads(whole.read())))
            except ConnectionRefusedError:
                path.unlink(missing_ok=True)
            except (OSError, ValueError):
                answers.append(Answer(process, None))
    return answers
