"""Debian packages that tests need, unpacked into the user's cache: nothing is installed on the machine."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

#: Seconds that a step may take, a download included.
_STEP_S = 280.0


def unpacked(package: str, name: str, *, deep: bool = False) -> Path:
    """Return the folder in the cache, called `name`, that holds a package with the libraries which are not installed.

    Those that it needs itself; with `deep` those that they need, too, which are many.

    Raises:
        OSError: there is no apt here.
        subprocess.SubprocessError: the package could not be had.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "penstock-tests"
    if not (root := cache / name).exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            needs = run(["apt-cache", "depends", "--important", *(["--recurse"] if deep else ()), package], folder)
            kin = ("lib", f"{package}-common")
            named = {line.split()[-1] for line in needs.splitlines()}
            absent = [name for name in sorted(named) if name.startswith(kin) and not _is_installed(name)]
            run(["apt-get", "download", package, *absent], folder)
            for file in Path(folder).glob("*.deb"):
                run(["dpkg", "-x", file.name, "root"], folder)
            with contextlib.suppress(OSError):  # another run was first
                (Path(folder) / "root").rename(root)
    return root


def libraries_in(root: Path) -> dict[str, str]:
    """Return the environment's variable that has programs find the libraries of an unpacked package."""
    return {"LD_LIBRARY_PATH": ":".join({str(found.parent) for found in root.glob("usr/lib/**/*.so*")})}


def run(
    command: Sequence[str], folder: str | Path, environment: Mapping[str, str] | None = None, given: str = ""
) -> str:
    """Return the output of a command; it must succeed."""
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        input=given,
        stdout=subprocess.PIPE,
        text=True,
        timeout=_STEP_S,
        check=True,
    )
    return done.stdout


def _is_installed(package: str) -> bool:
    return subprocess.run(["dpkg", "-s", package], capture_output=True, check=False).returncode == 0
