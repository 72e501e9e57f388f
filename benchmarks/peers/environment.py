"""The Python environment of a peer, in penstock's cache, separate from penstock's own."""

from __future__ import annotations

import fcntl
import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

from penstock.devbroker.java.jars import cache_folder

#: The folder from which scripts of peers import: the parent of `peers`.
BENCHMARKS = Path(__file__).parent.parent


def python_with(name: str, *requirements: str) -> Path:
    """Return the Python of an environment with `requirements`; make it if the cache does not have it.

    Raises:
        OSError: the cache cannot be written.
        subprocess.SubprocessError: the environment could not be made, or a requirement not be installed.
    """
    text = "\n".join((sys.version, *requirements))
    folder = cache_folder() / f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    python, whole = folder / "bin" / "python", folder / "whole"
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_name(f"{folder.name}.lock").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not whole.exists():
            shutil.rmtree(folder, ignore_errors=True)
            _run([sys.executable, "-m", "venv", str(folder)])
            _run([str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *requirements])
            whole.touch()
    return python


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, timeout=900, stdout=subprocess.DEVNULL)  # noqa: S603 - Python's own tools
