"""Environment variables for PySpark on a machine that may have no Java of its own."""

from __future__ import annotations

import hashlib
import os
import shlex
import sys
import tempfile
from pathlib import Path

from penstock.devbroker.java.jars import cache_folder
from penstock.devbroker.java.runtime import JavaRuntime, find_java
from penstock.errors import DevBrokerError

#: Spark 4 requests this module on every command line, and a Java without it refuses to start.
_VECTOR_MODULE = "jdk.incubator.vector"

_LAUNCHER = """\
#!/bin/sh
# Starts a Java that has no {module}, without the option that asks for it.
for argument do
  shift
  case $argument in
    --add-modules={module}) ;;
    *) set -- "$@" "$argument" ;;
  esac
done
exec {java} "$@"
"""


def spark_environment() -> dict[str, str]:
    """Return the environment variables for PySpark on this machine: JAVA_HOME and PYSPARK_PYTHON.

    Set them before the first session starts: `os.environ.update(spark_environment())`.

    Raises:
        DevBrokerError: no Java 17 or newer was found, or the cache cannot be written.
    """
    java = find_java()
    home = java.home if _VECTOR_MODULE in java.modules() else _launcher_home(java)
    # Spark's workers must run the interpreter of this process, and so have its packages.
    return {"JAVA_HOME": str(home), "PYSPARK_PYTHON": sys.executable}


def _launcher_home(java: JavaRuntime) -> Path:
    """Return a folder whose bin/java starts `java` without the option. It is made if it does not exist."""
    text = _LAUNCHER.format(module=_VECTOR_MODULE, java=shlex.quote(str(java.executable)))
    home = cache_folder() / f"java-{hashlib.sha256(text.encode()).hexdigest()[:12]}"
    launcher = home / "bin" / "java"
    if launcher.is_file():
        return home
    try:
        launcher.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=launcher.parent, delete=False) as file:
            file.write(text)
        made = Path(file.name)
        made.chmod(0o755)
        os.replace(made, launcher)  # noqa: PTH105 - another process may do the same: the last wins, both are complete
    except OSError as error:
        raise DevBrokerError(
            f"the Java launcher for Spark cannot be written to {home}: {error.strerror or error}; "
            "set XDG_CACHE_HOME to a folder that can be written"
        ) from error
    return home
