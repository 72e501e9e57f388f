"""A peer in Java: its jars, and our small programs compiled against them, in penstock's cache.

They are made once, by the Ivy inside pyspark and Eclipse's compiler: the Java of a wheel has none.
"""

from __future__ import annotations

import hashlib
import subprocess
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pyspark

from penstock.devbroker import JavaRuntime, find_java
from penstock.devbroker.java.jars import cache_folder, cached
from penstock.devbroker.java.runtime import trust_options

_COMPILER = ("org.eclipse.jdt", "ecj", "3.39.0")


@dataclass(frozen=True)
class JavaPeer:
    """A library, by name and version, and the folder with the programs that use it."""

    name: str
    version: str
    sources: Path
    #: Organisation, name and revision of each module to fetch, with its dependencies.
    modules: tuple[tuple[str, str, str], ...]

    def command(self, program: str, *options: str, before: Path | None = None) -> list[str]:
        """Return the command of a program without its arguments; fetch and compile it if the cache does not have it.

        Args:
            program: name of a class, of the folder or of the library.
            options: for the JVM.
            before: a folder whose files come before those of the jars.

        Raises:
            DevBrokerError: there is no Java, or the cache cannot be written.
            subprocess.SubprocessError: the jars could not be resolved, or the programs not compiled.
        """
        java = find_java()
        programs = sorted(self.sources.glob("*.java"))
        text = b"".join(file.read_bytes() for file in programs) + self._ivy_module().encode()
        folder = cache_folder() / f"{self.name}-{self.version}-{hashlib.sha256(text).hexdigest()[:12]}"
        cached(folder, partial(self._make, java, programs))
        places = [*([str(before)] if before else []), str(folder), f"{folder}/*"]
        return [str(java.executable), *options, "-cp", ":".join(places), program]

    def _ivy_module(self) -> str:
        dependencies = "\n".join(
            f'    <dependency org="{organisation}" name="{name}" rev="{revision}"/>'
            for organisation, name, revision in (*self.modules, _COMPILER)
        )
        return f"""\
<ivy-module version="2.0">
  <info organisation="penstock" module="{self.name}-runner"/>
  <configurations><conf name="default"/></configurations>
  <dependencies defaultconf="default->default">
{dependencies}
  </dependencies>
</ivy-module>
"""

    def _make(self, java: JavaRuntime, programs: list[Path], jars: Path, work: Path) -> None:
        """Fill a folder with the jars and the compiled programs."""
        (work / "ivy.xml").write_text(self._ivy_module())
        ivy = next(Path(pyspark.__file__).parent.glob("jars/ivy-*.jar"))
        options = trust_options(java, work)
        resolving = ["-jar", str(ivy), "-cache", str(work / "cache"), "-ivy", str(work / "ivy.xml"), "-warn"]
        pattern = f"{jars}/[artifact]-[revision](-[classifier]).[ext]"
        wanted = ["-retrieve", pattern, "-types", "jar", "bundle", "maven-plugin"]
        _run([str(java.executable), *options, *resolving, *wanted])
        compiler = next(jars.glob("ecj-*.jar")).rename(work / "ecj.jar")
        compiling = ["-jar", str(compiler), "-17", "-nowarn", "-classpath", ":".join(map(str, jars.glob("*.jar")))]
        _run([str(java.executable), *compiling, "-d", str(jars), *map(str, programs)])


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, timeout=600, stdout=subprocess.DEVNULL)  # noqa: S603 - Java, on files of ours
