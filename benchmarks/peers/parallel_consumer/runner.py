"""The command that runs Confluent's Parallel Consumer: its jars, and the runner beside this file compiled against them.

Jars and class are kept in penstock's cache, made once, by the Ivy inside pyspark and Eclipse's compiler: the Java of a
wheel has none.
"""

from __future__ import annotations

import hashlib
import subprocess
from functools import partial
from pathlib import Path

import pyspark

from penstock.devbroker import JavaRuntime, find_java
from penstock.devbroker.java.jars import cache_folder, cached
from penstock.devbroker.java.trust import trust_options

VERSION = "0.5.3.3"

_SOURCE = Path(__file__).with_name("PublishRunner.java")
_MODULES = f"""\
<ivy-module version="2.0">
  <info organisation="penstock" module="parallel-consumer-runner"/>
  <configurations><conf name="default"/></configurations>
  <dependencies defaultconf="default->default">
    <dependency org="io.confluent.parallelconsumer" name="parallel-consumer-core" rev="{VERSION}"/>
    <dependency org="org.slf4j" name="slf4j-nop" rev="2.0.13"/>
    <dependency org="org.eclipse.jdt" name="ecj" rev="3.39.0"/>
  </dependencies>
</ivy-module>
"""


def runner_command() -> list[str]:
    """Return the command of the runner without its arguments, making what it needs if the cache does not have it.

    Raises:
        DevBrokerError: there is no Java, or the cache cannot be written.
        subprocess.CalledProcessError: the jars could not be resolved, or the runner not compiled.
    """
    java = find_java()
    text = _SOURCE.read_bytes() + _MODULES.encode()
    folder = cache_folder() / f"parallel-consumer-{VERSION}-{hashlib.sha256(text).hexdigest()[:12]}"
    cached(folder, partial(_make, java))
    return [str(java.executable), "-Xmx2g", "-cp", f"{folder}:{folder}/*", _SOURCE.stem]


def _make(java: JavaRuntime, jars: Path, work: Path, _progress: bool | None) -> None:
    """Fill a folder with the jars and the compiled runner."""
    (work / "ivy.xml").write_text(_MODULES)
    ivy = next(Path(pyspark.__file__).parent.glob("jars/ivy-*.jar"))
    options = trust_options(java, work)
    resolving = ["-jar", str(ivy), "-cache", str(work / "cache"), "-ivy", str(work / "ivy.xml"), "-warn"]
    wanted = ["-retrieve", f"{jars}/[artifact]-[revision].[ext]", "-types", "jar", "bundle", "maven-plugin"]
    _run([str(java.executable), *options, *resolving, *wanted])
    compiler = next(jars.glob("ecj-*.jar")).rename(work / "ecj.jar")
    compiling = ["-jar", str(compiler), "-17", "-nowarn", "-classpath", ":".join(map(str, jars.glob("*.jar")))]
    _run([str(java.executable), *compiling, "-d", str(jars), str(_SOURCE)])


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, timeout=600, stdout=subprocess.DEVNULL)  # noqa: S603 - Java, on files of ours
