"""Kafka's jars in the user's cache: fetched once, by package coordinates, with the Ivy inside pyspark.

The folder is renamed to its final name when it is complete. So a killed resolver never leaves a partial cache.
"""

from __future__ import annotations

import fcntl
import importlib.util
import logging
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

from rich.console import Console

from penstock.devbroker.java.runtime import JavaRuntime, trust_options
from penstock.errors import DevBrokerError

#: The environment may name another version. 4.3 and 4.4 omit the markers of a Kafka transaction if a partition has no
#: leader at its end, as while a single broker restarts. The transaction counts as ended, and its readers wait for ever
#: (KAFKA-20734).
KAFKA_VERSION = os.environ.get("PENSTOCK_KAFKA_VERSION") or "4.2.2"

#: Seconds for the resolver; about half a minute is usual.
_FETCH_TIMEOUT_S = 600.0

_LAST_LINES = 20

_log = logging.getLogger("penstock.devbroker")

#: Puts the jars into a folder. The arguments are that folder, and one for the resolver's own files.
Resolver = Callable[[Path, Path], None]


def cache_folder() -> Path:
    """Return penstock's folder in the user's cache ($XDG_CACHE_HOME, else ~/.cache)."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "penstock"


def jars_folder() -> Path:
    """Return the folder of Kafka's jars, which may not exist yet."""
    return cache_folder() / f"kafka-{KAFKA_VERSION}"


def kafka_jars(java: JavaRuntime) -> Path:
    """Return a folder with Kafka's jars, and fetch them if they are not in the cache.

    Args:
        java: the runtime that runs the resolver.

    Raises:
        DevBrokerError: they could not be fetched; the message ends with the resolver's last lines.
    """
    return cached(jars_folder(), partial(_resolve_with_ivy, java))


def cached(folder: Path, resolver: Resolver) -> Path:
    """Return `folder`. If it does not exist, `resolver` fills it first. Safe between threads and processes."""
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with folder.with_name(f"{folder.name}.lock").open("ab") as lock:
            # The kernel releases it if the holder is killed.
            fcntl.flock(lock, fcntl.LOCK_EX)
            if folder.is_dir():
                return folder
            # This process has the lock, so leftovers belong to killed resolvers.
            for leftover in folder.parent.glob(f"{folder.name}.partial-*"):
                shutil.rmtree(leftover, ignore_errors=True)
            with tempfile.TemporaryDirectory(prefix=f"{folder.name}.partial-", dir=folder.parent) as name:
                jars, work = Path(name) / "jars", Path(name) / "work"
                jars.mkdir()
                work.mkdir()
                resolver(jars, work)
                jars.rename(folder)
    except OSError as error:
        raise DevBrokerError(
            f"Kafka's jars cannot be kept in {folder}: {error.strerror or error}; "
            "free some space or set XDG_CACHE_HOME to a folder that can be written"
        ) from error
    return folder


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
        # Without `bundle`, scala-logging is missing and the broker dies while it loads its classes.
        *("-types", "jar", "bundle", "maven-plugin"),
        "-warn",
    ]
    text = f"fetching Kafka {KAFKA_VERSION} into the cache, once; this takes about half a minute"
    _log.info("%s", text)
    try:
        with log_path.open("wb") as log, Console(stderr=True).status(text):
            done = subprocess.run(command, stdout=log, stderr=log, check=False, timeout=_FETCH_TIMEOUT_S)  # noqa: S603 - the Java that was found
        outcome = f"ended with code {done.returncode}"
    except subprocess.TimeoutExpired:
        outcome = f"did not end within {_FETCH_TIMEOUT_S:g} s"
    if outcome != "ended with code 0" or not any(jars.glob("kafka_2.13-*.jar")):
        raise DevBrokerError(
            f"Kafka {KAFKA_VERSION} could not be fetched: Ivy {outcome}. Check the network, a proxy's or "
            f"mirror's Java and Ivy settings, and the certificates. Its last lines:\n{last_lines(log_path)}"
        )
    _bring_logging(jars)


def _bring_logging(jars: Path) -> None:
    """Replace the fetched logging jars by pyspark's: Kafka's own lack the link from slf4j to log4j."""
    for stem in ("slf4j-api", "log4j-api", "log4j-core", "log4j-slf4j2-impl"):
        for resolved in jars.glob(f"{stem}-*.jar"):
            resolved.unlink()
        shutil.copy(_pyspark_jar(stem), jars)


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
    """Return the last lines of a log, without empty ones."""
    try:
        text = path.read_text(errors="replace")
    except FileNotFoundError:
        return "(it printed nothing)"
    lines = [line for line in text.splitlines() if line.strip()]
    return "\n".join(lines[-_LAST_LINES:]) or "(it printed nothing)"
