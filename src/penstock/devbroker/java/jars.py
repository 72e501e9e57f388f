"""Kafka's jars in the user's cache: resolved once, by the Ivy inside pyspark, by package coordinates alone.

A cache is trusted only when it carries the list of its files and they are all there, and it takes its name only when
it is whole, by a rename; so a killed resolver leaves nothing that looks like a cache.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib.util
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from penstock.devbroker.java.runtime import JavaRuntime
from penstock.devbroker.java.trust import trust_options
from penstock.errors import DevBrokerError
from penstock.supervisor.child import Child

#: The environment may name another one. 4.3 and 4.4 leave the markers of a Kafka transaction out where a partition has
#: no leader when it ends, as each has while a single broker restarts: the transaction counts as ended, and its readers
#: wait for ever (KAFKA-20734).
KAFKA_VERSION = os.environ.get("PENSTOCK_KAFKA_VERSION") or "4.2.2"

#: Name of the list of files, one `size name` a line, written last.
_LIST = "files.txt"

#: Seconds without a new jar and without an end after which a resolver counts as stuck.
_STUCK_AFTER_S = 180.0

_LOOK_INTERVAL_S = 0.2

_LAST_LINES = 20

_log = logging.getLogger("penstock.devbroker")

#: Puts the jars into a folder: the folder for them, and one for the resolver's own files.
Resolver = Callable[[Path, Path], None]


def cache_folder() -> Path:
    """Return penstock's folder in the user's cache ($XDG_CACHE_HOME, else ~/.cache)."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "penstock"


def jars_folder() -> Path:
    """Return the folder that holds Kafka's jars once they are resolved."""
    return cache_folder() / f"kafka-{KAFKA_VERSION}"


def kafka_jars(java: JavaRuntime) -> Path:
    """Return a folder with Kafka's jars, resolving them if the cache does not have them.

    Args:
        java: the runtime that runs the resolver.

    Raises:
        DevBrokerError: they could not be resolved; the message carries the resolver's last lines.
    """
    return cached(jars_folder(), partial(_resolve_with_ivy, java))


def cached(folder: Path, resolver: Resolver) -> Path:
    """Return `folder`, filled by `resolver` unless it is whole already. Safe between threads and processes."""
    if is_whole(folder):
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with _locked(folder.with_name(f"{folder.name}.lock")):
            if is_whole(folder):
                return folder
            # The lock is ours, so what is left there belongs to resolvers that were killed.
            for leftover in folder.parent.glob(f"{folder.name}.partial-*"):
                shutil.rmtree(leftover, ignore_errors=True)
            with tempfile.TemporaryDirectory(prefix=f"{folder.name}.partial-", dir=folder.parent) as name:
                jars, work = Path(name) / "jars", Path(name) / "work"
                jars.mkdir()
                work.mkdir()
                resolver(jars, work)
                _write_list(jars)
                if folder.exists():
                    _log.warning("the jar cache %s was incomplete and is replaced", folder)
                    shutil.rmtree(folder)
                jars.rename(folder)
    except OSError as error:
        raise DevBrokerError(
            f"Kafka's jars cannot be kept in {folder}: {error.strerror or error}; "
            "free some space or set XDG_CACHE_HOME to a folder that can be written"
        ) from error
    return folder


def is_whole(folder: Path) -> bool:
    """Tell whether every file of the folder's list is there in its full size."""
    try:
        lines = (folder / _LIST).read_text().splitlines()
        return bool(lines) and all(
            (folder / name).stat().st_size == int(size) for size, name in (line.split(" ", 1) for line in lines)
        )
    except (OSError, ValueError):
        return False


def _write_list(folder: Path) -> None:
    files = sorted(folder.iterdir())
    (folder / _LIST).write_text("".join(f"{file.stat().st_size} {file.name}\n" for file in files))


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold an exclusive lock; the kernel gives it back when a holder is killed."""
    with path.open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _log.info("another process is fetching Kafka's jars; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _resolve_with_ivy(java: JavaRuntime, jars: Path, work: Path) -> None:
    log_path = work / "ivy.log"
    command = [
        str(java.executable),
        *trust_options(java, work),
        "-jar",
        str(_pyspark_jar("ivy")),
        "-cache",
        str(work / "cache"),
        *("-dependency", "org.apache.kafka", "kafka_2.13", KAFKA_VERSION),
        *("-confs", "default"),
        *("-retrieve", f"{jars}/[artifact]-[revision](-[classifier]).[ext]"),
        # Without `bundle`, scala-logging is left out and the broker dies while it loads its classes.
        *("-types", "jar", "bundle", "maven-plugin"),
        "-warn",
    ]
    with log_path.open("wb") as log:
        child = Child(command, stdout=log, stderr=log)
    try:
        code = _wait(child, work / "cache")
        if code != 0 or not any(jars.glob("kafka_2.13-*.jar")):
            outcome = "stood still" if code is None else f"ended with code {code}"
            raise DevBrokerError(
                f"Kafka {KAFKA_VERSION} could not be fetched: Ivy {outcome}. Check the network, a proxy's or "
                f"mirror's Java and Ivy settings, and the certificates. Its last lines:\n{last_lines(log_path)}"
            )
    finally:
        child.close()
    _bring_logging(jars)


def _bring_logging(jars: Path) -> None:
    """Put pyspark's logging jars instead of those resolved: Kafka's own lack the link from slf4j to log4j."""
    for stem in ("slf4j-api", "log4j-api", "log4j-core", "log4j-slf4j2-impl"):
        for resolved in jars.glob(f"{stem}-*.jar"):
            resolved.unlink()
        shutil.copy(_pyspark_jar(stem), jars)


def _wait(child: Child, downloads: Path) -> int | None:
    """Return the resolver's exit code, or None when nothing has come for too long; show progress on a terminal."""
    console = Console(stderr=True)
    if not console.is_terminal:
        _log.info("fetching Kafka %s into the cache, once; this takes about half a minute", KAFKA_VERSION)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task(f"fetching Kafka {KAFKA_VERSION}, once", total=None)
        seen, last_news = -1, time.monotonic()
        while (code := child.wait(_LOOK_INTERVAL_S)) is None:
            count = sum(1 for _ in downloads.rglob("*.jar"))
            if count != seen:
                seen, last_news = count, time.monotonic()
                bar.update(task, description=f"fetching Kafka {KAFKA_VERSION}, once: {count} jars")
            elif time.monotonic() - last_news > _STUCK_AFTER_S:
                return None
    return code


def _pyspark_jar(stem: str) -> Path:
    spec = importlib.util.find_spec("pyspark")
    folders = [] if spec is None else list(spec.submodule_search_locations or ())
    found = next((jar for folder in folders for jar in Path(folder, "jars").glob(f"{stem}-[0-9]*.jar")), None)
    if found is None:
        raise DevBrokerError(
            f"the embedded broker fetches Kafka with the Ivy inside pyspark, whose {stem} jar was not found; "
            "run: pip install 'penstock[dev-broker]'"
        )
    return found


def last_lines(path: Path) -> str:
    """Return the last lines of a log, those that are not empty."""
    try:
        text = path.read_text(errors="replace")
    except FileNotFoundError:
        return "(it printed nothing)"
    lines = [line for line in text.splitlines() if line.strip()]
    return "\n".join(lines[-_LAST_LINES:]) or "(it printed nothing)"
