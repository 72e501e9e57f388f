"""A MariaDB for the tests: the server that is installed, or Debian's package, unpacked without root into a cache."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from support.debian import libraries_in, run, unpacked

#: Names of a server's program, and Debian's package of it.
_PROGRAMS = ("mariadbd", "mysqld")
_PACKAGE = "mariadb-server-core"
#: Seconds for one step on a busy machine, and for the server's end.
_STEP_S = 280.0
_END_S = 60.0
#: How often a port is chosen.
_TRIES = 3
#: The user of the tests, who may give rights to others.
_USERS = """CREATE USER penstock@'127.0.0.1';
GRANT ALL ON *.* TO penstock@'127.0.0.1' WITH GRANT OPTION;
"""


@contextmanager
def running() -> Iterator[str]:
    """Run a server on 127.0.0.1 and give its address; an empty one where no server can be had."""
    try:
        program, root = _program()
    except (OSError, subprocess.SubprocessError) as error:
        print(f"no MariaDB can be had: {error}")  # noqa: T201
        yield ""
        return
    with tempfile.TemporaryDirectory(prefix="penstock-mariadb-") as name:
        folder, environment = Path(name), dict(os.environ)
        command = [program, "--no-defaults", f"--datadir={folder / 'data'}", "--innodb-flush-log-at-trx-commit=0"]
        if root != Path("/"):
            environment |= libraries_in(root)
            command.append(f"--basedir={root / 'usr'}")
        if os.getuid() == 0:
            command.append("--user=root")
        # A start deletes temporary tables in its folder, so that of another server must be another one.
        (folder / "tmp").mkdir()
        command.append(f"--tmpdir={folder / 'tmp'}")
        _make_data(command, folder / "data", root, environment)
        (folder / "users.sql").write_text(_USERS, encoding="utf-8")
        command += ["--bind-address=127.0.0.1", f"--socket={folder}/socket", f"--pid-file={folder}/pid"]
        command += [f"--init-file={folder}/users.sql", "--skip-name-resolve", "--max-connections=300"]
        server, port = _started(command, environment)
        try:
            yield f"mysql+pymysql://penstock@127.0.0.1:{port}/mysql"
        finally:
            server.terminate()
            server.wait(_END_S)


def _started(command: Sequence[str], environment: Mapping[str, str]) -> tuple[subprocess.Popen[bytes], int]:
    """Start the server on a free port, and wait until it answers."""
    import pymysql

    deadline = time.monotonic() + _STEP_S
    for _ in range(_TRIES):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        server = subprocess.Popen([*command, f"--port={port}"], env=environment)
        while server.poll() is None:
            with contextlib.suppress(pymysql.err.OperationalError):
                pymysql.connect(host="127.0.0.1", port=port, user="penstock").close()
                if server.poll() is None:
                    return server, port
            if time.monotonic() > deadline:
                server.kill()
            time.sleep(0.05)
    raise RuntimeError("MariaDB did not start; its log is above")


def _program() -> tuple[str, Path]:
    """Return the server's program, and the folder that holds its `usr`."""
    for name in _PROGRAMS:
        if found := shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin"):
            return found, Path("/")
    root = unpacked(_PACKAGE, "mariadb")
    return str(root / "usr/sbin/mariadbd"), root


def _make_data(command: Sequence[str], data: Path, root: Path, environment: Mapping[str, str]) -> None:
    data.mkdir()
    if "MariaDB" not in run([command[0], "--version"], data, environment):
        run([*command, "--initialize-insecure"], data, environment)
        return
    # What mariadb-install-db does, which is not in that package.
    scripts = [
        next(root.glob(f"usr/share/m*/m*_{name}.sql")).read_text(encoding="utf-8")
        for name in ("system_tables", "performance_tables", "system_tables_data")
    ]
    begin = "CREATE DATABASE mysql;\nUSE mysql;\nSET @auth_root_socket = NULL;\n"
    run([*command, "--bootstrap"], data, environment, begin + "\n".join(scripts))
