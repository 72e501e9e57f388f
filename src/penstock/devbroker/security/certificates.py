"""Certificates made on the spot: a private authority, the broker's certificate and those of clients, as PEM files."""

from __future__ import annotations

import importlib.util
import os
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.errors import DevBrokerError

if TYPE_CHECKING:
    from trustme import CA, LeafCert

#: Names under which clients reach the broker: they compare the certificate with the address they called.
_SERVER_NAMES = ("127.0.0.1", "localhost")


@dataclass(frozen=True, slots=True)
class Certificate:
    """A client's certificate and key, as PEM files."""

    #: The common name in it, which the broker takes for the user.
    name: str
    certificate_path: Path
    #: Without a password, for the file's owner alone.
    key_path: Path
    #: The authority that signed the broker's certificate.
    ca_path: Path

    @property
    def config(self) -> dict[str, str]:
        """The client settings to connect with it, by librdkafka's names, without the address."""
        return {
            "security.protocol": "ssl",
            "ssl.ca.location": str(self.ca_path),
            "ssl.certificate.location": str(self.certificate_path),
            "ssl.key.location": str(self.key_path),
        }


class Certificates:
    """One authority with all it signs, in a folder of its owner's. For one thread at a time."""

    def __init__(self, folder: Path) -> None:
        require_trustme()
        from trustme import CA

        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self._authority = CA()
        self.ca_path = folder / "ca.pem"
        self.server_path = folder / "server.pem"
        self._authority.cert_pem.write_to_path(self.ca_path)
        server = _issue(self._authority, _SERVER_NAMES, "localhost")
        write_private(self.server_path, _java_key(server) + _chain(server))

    def issue(self, name: str) -> Certificate:
        """Return a certificate for a client of that name."""
        made = Certificate(name, self._folder / f"{name}.crt.pem", self._folder / f"{name}.key.pem", self.ca_path)
        # Java refuses a certificate whose list of further names is empty.
        leaf = _issue(self._authority, (f"{name}@localhost",), name)
        made.certificate_path.write_bytes(_chain(leaf))
        write_private(made.key_path, leaf.private_key_pem.bytes())
        return made


def require_trustme() -> None:
    """Raise `DevBrokerError` when the library that makes certificates is missing."""
    if importlib.util.find_spec("trustme") is None:
        raise DevBrokerError(
            "the embedded broker makes its certificates with the package trustme, which is not installed; "
            "run: pip install 'penstock[dev-broker-tls]'"
        )


def write_private(path: Path, content: bytes) -> None:
    """Write a file that its owner alone can read, from its first byte on."""
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)


def _issue(authority: CA, identities: tuple[str, ...], common_name: str) -> LeafCert:
    now, kept = datetime.now(UTC), timedelta(days=3650)
    return authority.issue_cert(*identities, common_name=common_name, not_before=now, not_after=now + kept)


def _chain(leaf: LeafCert) -> bytes:
    return b"".join(pem.bytes() for pem in leaf.cert_chain_pems)


def _java_key(leaf: LeafCert) -> bytes:
    """Return the key in the one form that Kafka reads: PKCS 8."""
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key

    key = load_pem_private_key(leaf.private_key_pem.bytes(), password=None)
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
