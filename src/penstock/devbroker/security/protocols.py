"""How clients prove to an embedded broker who they are: the broker's settings, and those of each client."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from pathlib import Path

from penstock.devbroker.security.certificates import Certificates, require_trustme
from penstock.errors import ConfigurationError, DevBrokerError

#: The user that may do everything, kept by the broker for whoever started it.
ADMIN = "admin"

#: Who talks over the listeners without security: the broker with itself, and we with it.
_INSIDE = "ANONYMOUS"

MECHANISM = "SCRAM-SHA-512"

#: What passes unquoted through JAAS settings, certificates and client settings alike.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


class Security(Enum):
    """How clients connect to an embedded broker."""

    #: User and password (SCRAM-SHA-512) over TLS.
    SASL_SSL = "sasl_ssl"
    #: TLS where the client shows a certificate too; its common name is the user.
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
    #: The client settings to connect as this user, by librdkafka's names, without the address; with the password.
    config: Mapping[str, str] = field(repr=False)


class ClientSecurity:
    """The secured listener of one broker, its users and their passwords. For one thread at a time."""

    def __init__(self, kind: Security, folder: Path, *, acls: bool) -> None:
        self.kind = kind
        self.has_acls = acls
        self._folder = folder
        #: The password of every user, the administrator's included.
        self.passwords = {ADMIN: secrets.token_urlsafe(24)}

    @cached_property
    def certificates(self) -> Certificates:
        """The authority of this broker; `DevBrokerError` where its kind of security has none."""
        if not self.kind.has_tls:
            raise DevBrokerError(
                f"an embedded broker with security={self.kind.value!r} has no certificates; "
                "start it with security='sasl_ssl' or 'ssl'"
            )
        return Certificates(self._folder)

    def broker_settings(self) -> dict[str, str]:
        """Return the broker's settings for the listener CLIENT, and for ACLs."""
        settings: dict[str, str] = {}
        if self.kind.has_tls:
            settings |= {
                "ssl.keystore.type": "PEM",
                "ssl.keystore.location": str(self.certificates.server_path),
                "ssl.truststore.type": "PEM",
                "ssl.truststore.location": str(self.certificates.ca_path),
            }
        if self.kind is Security.SSL:
            settings["listener.name.client.ssl.client.auth"] = "required"
            settings["ssl.principal.mapping.rules"] = "RULE:^.*CN=([^,]+).*$/$1/"
        else:
            settings["listener.name.client.sasl.enabled.mechanisms"] = MECHANISM
            settings[f"listener.name.client.{MECHANISM.lower()}.sasl.jaas.config"] = (
                "org.apache.kafka.common.security.scram.ScramLoginModule required;"
            )
        if self.has_acls:
            settings |= {
                "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
                "allow.everyone.if.no.acl.found": "false",
                "super.users": f"User:{_INSIDE};User:{ADMIN}",
            }
        return settings

    def add(self, name: str, password: str | None) -> str:
        """Take a user, or a new password for one, and return the password; None keeps the old one or makes one."""
        check_user(name, password)
        if password is not None and not self.kind.has_passwords:
            raise ConfigurationError(
                f"password= is given for {name!r}, but users of an embedded broker with "
                f"security={self.kind.value!r} have none; leave it out"
            )
        self.passwords[name] = password or self.passwords.get(name) or secrets.token_urlsafe(24)
        return self.passwords[name]

    def client_settings(self, name: str) -> dict[str, str]:
        """Return the settings with which a client connects as that user."""
        if self.kind is Security.SSL:
            return self.certificates.issue(name).config
        return {
            "security.protocol": self.kind.value,
            **({"ssl.ca.location": str(self.certificates.ca_path)} if self.kind.has_tls else {}),
            "sasl.mechanism": MECHANISM,
            "sasl.username": name,
            "sasl.password": self.passwords[name],
        }


def check_security(security: Security | None, *, acls: bool) -> None:
    """Raise where options of a broker contradict each other or lack a library, before anything starts."""
    if acls and security is None:
        kinds = ", ".join(repr(kind.value) for kind in Security)
        raise ConfigurationError(f"acls=True needs users to tell apart: give security= too, one of {kinds}")
    if security is not None and security.has_tls:
        require_trustme()


def check_user(name: str, password: str | None = None) -> None:
    """Raise `ConfigurationError` unless a user can have that name and password."""
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ConfigurationError(
            f"a user's name must be letters, digits, dots, dashes and underlines and begin with one of the first two, "
            f"but is {name!r}"
        )
    if name in {ADMIN, _INSIDE}:
        raise ConfigurationError(f"the user {name!r} belongs to the embedded broker; choose another name")
    if password is not None and (not password or "\0" in password):
        raise ConfigurationError(f"the password of {name!r} is empty or holds a zero character; choose another one")
