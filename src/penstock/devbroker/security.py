"""Authentication to an embedded broker: kinds of security, passwords, and certificates that it makes itself."""

from __future__ import annotations

import importlib.util
import os
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.errors import ConfigurationError, DevBrokerError

if TYPE_CHECKING:
    from trustme import LeafCert

#: The user with all permissions, for the process that starts the broker.
ADMIN = "admin"

#: The user on the listeners without security, which the broker itself and this process use.
_INSIDE = "ANONYMOUS"

MECHANISM = "SCRAM-SHA-512"

#: Names that need no quoting in JAAS settings, certificates and client settings.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class Security(Enum):
    """How clients connect to an embedded broker."""

    #: User and password (SCRAM-SHA-512) over TLS.
    SASL_SSL = "sasl_ssl"
    #: TLS with client certificates; their common name is the user.
    SSL = "ssl"
    #: User and password, not encrypted.
    SASL_PLAINTEXT = "sasl_plaintext"

    @property
    def has_tls(self) -> bool:
        """Whether connections are encrypted."""
        return self is not Security.SASL_PLAINTEXT

    @property
    def has_passwords(self) -> bool:
        """Whether users have passwords."""
        return self is not Security.SSL


@dataclass(frozen=True, slots=True)
class User:
    """A user of an embedded broker; Kafka's principal is `User:NAME`."""

    name: str
    #: The client settings of this user, by librdkafka's names, with the password and without the address.
    config: Mapping[str, str] = field(repr=False)


class ClientSecurity:
    """The secured listener of one broker, its users and their passwords. For one thread at a time.

    Args:
        kind: how clients connect.
        folder: the folder for certificates.
    """

    def __init__(self, kind: Security, folder: Path) -> None:
        self.kind = kind
        self._folder = folder
        self._ca_path = folder / "ca.pem"
        #: The password of every user, the administrator's included.
        self.passwords = {ADMIN: secrets.token_urlsafe(24)}
        if kind.has_tls:
            from trustme import CA

            folder.mkdir(parents=True, exist_ok=True)
            self._authority = CA()
            self._authority.cert_pem.write_to_path(self._ca_path)
            # Clients compare the certificate with the address that they connect to.
            server = self._issue("localhost", "127.0.0.1", "localhost")
            write_private(folder / "server.pem", _java_key(server) + _chain(server))

    def broker_settings(self, *, acls: bool) -> dict[str, str]:
        """Return the broker's settings for the listener CLIENT, and for ACLs."""
        settings: dict[str, str] = {}
        if self.kind.has_tls:
            settings |= {
                "ssl.keystore.type": "PEM",
                "ssl.keystore.location": str(self._folder / "server.pem"),
                "ssl.truststore.type": "PEM",
                "ssl.truststore.location": str(self._ca_path),
            }
        if self.kind.has_passwords:
            settings["listener.name.client.sasl.enabled.mechanisms"] = MECHANISM
            settings[f"listener.name.client.{MECHANISM.lower()}.sasl.jaas.config"] = (
                "org.apache.kafka.common.security.scram.ScramLoginModule required;"
            )
        else:
            settings["listener.name.client.ssl.client.auth"] = "required"
            settings["ssl.principal.mapping.rules"] = "RULE:^.*CN=([^,]+).*$/$1/"
        if acls:
            settings |= {
                "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
                "allow.everyone.if.no.acl.found": "false",
                "super.users": f"User:{_INSIDE};User:{ADMIN}",
            }
        return settings

    def add(self, name: str, password: str | None) -> str:
        """Add a user, or change its password, and return the password. None keeps the old one or generates one."""
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise ConfigurationError(
                "a user's name must be letters, digits, dots, dashes and underlines and begin with one of the first "
                f"two, but is {name!r}"
            )
        if name in {ADMIN, _INSIDE}:
            raise ConfigurationError(f"the user {name!r} belongs to the embedded broker; choose another name")
        if password is not None and not self.kind.has_passwords:
            raise ConfigurationError(
                f"password= is given for {name!r}, but users of an embedded broker with "
                f"security={self.kind.value!r} have none; leave it out"
            )
        if password is not None and (not password or "\0" in password):
            raise ConfigurationError(f"the password of {name!r} is empty or holds a zero character; choose another one")
        self.passwords[name] = password or self.passwords.get(name) or secrets.token_urlsafe(24)
        return self.passwords[name]

    def client_settings(self, name: str) -> dict[str, str]:
        """Return the client settings of a user, by librdkafka's names."""
        settings = {"security.protocol": self.kind.value}
        if self.kind.has_tls:
            settings["ssl.ca.location"] = str(self._ca_path)
        if self.kind.has_passwords:
            return settings | {
                "sasl.mechanism": MECHANISM,
                "sasl.username": name,
                "sasl.password": self.passwords[name],
            }
        certificate, key = self._folder / f"{name}.crt.pem", self._folder / f"{name}.key.pem"
        leaf = self._issue(name, f"{name}@localhost")  # Java refuses an empty list of alternative names
        certificate.write_bytes(_chain(leaf))
        write_private(key, leaf.private_key_pem.bytes())
        return settings | {"ssl.certificate.location": str(certificate), "ssl.key.location": str(key)}

    def _issue(self, common_name: str, *identities: str) -> LeafCert:
        """Issue a certificate, valid for ten years."""
        now = datetime.now(UTC)
        until = now + timedelta(days=3650)
        return self._authority.issue_cert(*identities, common_name=common_name, not_before=now, not_after=until)


def check_security(security: Security | None, *, acls: bool) -> None:
    """Raise if options of a broker contradict each other or need a missing library, before anything starts."""
    if acls and security is None:
        kinds = ", ".join(repr(kind.value) for kind in Security)
        raise ConfigurationError(f"acls=True needs users: give security= too, one of {kinds}")
    if security is not None and security.has_tls and importlib.util.find_spec("trustme") is None:
        raise DevBrokerError(
            "the embedded broker makes its certificates with the package trustme, which is not installed; "
            "run: pip install 'penstock[dev-broker-tls]'"
        )


def write_private(path: Path, content: bytes) -> None:
    """Write a file that only its owner can ever read."""
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
        file.write(content)


def _chain(leaf: LeafCert) -> bytes:
    return b"".join(pem.bytes() for pem in leaf.cert_chain_pems)


def _java_key(leaf: LeafCert) -> bytes:
    """Return the key in PKCS 8, the only form that Kafka reads."""
    from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key

    key = load_pem_private_key(leaf.private_key_pem.bytes(), password=None)
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
