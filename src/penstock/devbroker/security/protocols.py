"""How clients prove to an embedded broker who they are: the broker's settings, and those of each client."""

from __future__ import annotations

import base64
import json
import re
import secrets
import time
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

SCRAM_MECHANISMS = ("SCRAM-SHA-256", "SCRAM-SHA-512")
_MECHANISMS = (*SCRAM_MECHANISMS, "PLAIN")

#: What passes unquoted through JAAS settings, certificates and client settings alike.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")

_LOGIN_MODULES = "org.apache.kafka.common.security"


class Security(Enum):
    """How clients connect to an embedded broker."""

    #: User and password (SCRAM-SHA-256, SCRAM-SHA-512 or PLAIN) over TLS.
    SASL_SSL = "sasl_ssl"
    #: TLS where the client shows a certificate too; its common name is the user.
    SSL = "ssl"
    #: User and password, not encrypted.
    SASL_PLAINTEXT = "sasl_plaintext"
    #: OAUTHBEARER over TLS; tokens need no signature, their claim `sub` is the user.
    OAUTHBEARER = "oauthbearer"

    @property
    def protocol(self) -> str:
        """Kafka's name of the protocol of the listener."""
        return "SASL_SSL" if self is Security.OAUTHBEARER else self.name

    @property
    def has_tls(self) -> bool:
        """Whether connections are encrypted."""
        return self is not Security.SASL_PLAINTEXT

    @property
    def has_passwords(self) -> bool:
        """Whether users have passwords."""
        return self in {Security.SASL_SSL, Security.SASL_PLAINTEXT}


@dataclass(frozen=True, slots=True)
class User:
    """A user of an embedded broker; Kafka's principal is `User:NAME`."""

    name: str
    #: The client settings to connect as this user, by librdkafka's names, without the address; with the password.
    config: Mapping[str, str] = field(repr=False)


class ClientSecurity:
    """The secured listener of one broker, its users and their passwords. For one thread at a time."""

    def __init__(
        self, kind: Security, folder: Path, users: Mapping[str, str], *, acls: bool, expired_certificate: bool
    ) -> None:
        self.kind = kind
        self.has_acls = acls
        self._folder = folder
        self._expired_certificate = expired_certificate
        #: What `broker_settings` wrote last: a broker reads passwords for PLAIN when it starts, and only then.
        self._plain_users: frozenset[str] = frozenset()
        #: The password of every user, the administrator's included.
        self.passwords = {ADMIN: secrets.token_urlsafe(24), **users}

    @cached_property
    def certificates(self) -> Certificates:
        """The authority of this broker; `DevBrokerError` where its kind of security has none."""
        if not self.kind.has_tls:
            raise DevBrokerError(
                f"an embedded broker with security={self.kind.value!r} has no certificates; "
                "start it with security='sasl_ssl', 'ssl' or 'oauthbearer'"
            )
        return Certificates(self._folder, server_expired=self._expired_certificate)

    def broker_settings(self) -> dict[str, str]:
        """Return the broker's settings for the listener CLIENT, and for ACLs. They contain passwords."""
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
        elif self.kind is Security.OAUTHBEARER:
            settings["listener.name.client.sasl.enabled.mechanisms"] = "OAUTHBEARER"
            settings["listener.name.client.oauthbearer.sasl.jaas.config"] = (
                f'{_LOGIN_MODULES}.oauthbearer.OAuthBearerLoginModule required unsecuredLoginStringClaim_sub="{ADMIN}";'
            )
        else:
            settings["listener.name.client.sasl.enabled.mechanisms"] = ",".join(_MECHANISMS)
            for mechanism in SCRAM_MECHANISMS:
                settings[f"listener.name.client.{mechanism.lower()}.sasl.jaas.config"] = (
                    f"{_LOGIN_MODULES}.scram.ScramLoginModule required;"
                )
            known = "".join(f" user_{name}={_quoted(password)}" for name, password in self.passwords.items())
            settings["listener.name.client.plain.sasl.jaas.config"] = (
                f"{_LOGIN_MODULES}.plain.PlainLoginModule required{known};"
            )
            self._plain_users = frozenset(self.passwords)
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
        known = self.passwords.get(name) or secrets.token_urlsafe(24)
        if password is not None and password != known:
            self._plain_users -= {name}
            known = password
        self.passwords[name] = known
        return known

    def client_settings(self, name: str, mechanism: str) -> dict[str, str]:
        """Return the settings with which a client connects as that user; `ConfigurationError` where it cannot."""
        if self.kind is Security.SSL:
            return self.certificates.issue(name).config
        settings = {"security.protocol": self.kind.protocol.lower()}
        if self.kind.has_tls:
            settings["ssl.ca.location"] = str(self.certificates.ca_path)
        if self.kind is Security.OAUTHBEARER:
            return {
                **settings,
                "sasl.mechanism": "OAUTHBEARER",
                "enable.sasl.oauthbearer.unsecure.jwt": "true",
                "sasl.oauthbearer.config": f"principal={name}",
            }
        if mechanism not in _MECHANISMS:
            raise ConfigurationError(f"mechanism must be one of {', '.join(_MECHANISMS)}, but is {mechanism!r}")
        if mechanism == "PLAIN" and name not in self._plain_users:
            raise ConfigurationError(
                f"the broker reads passwords for PLAIN when it starts, and {name!r} came later; "
                "give it to DevBroker(users={name: password}), or call restart()"
            )
        return {
            **settings,
            "sasl.mechanism": mechanism,
            "sasl.username": name,
            "sasl.password": self.passwords[name],
        }


def check_security(
    security: Security | None, users: Mapping[str, str], *, acls: bool, expired_certificate: bool
) -> None:
    """Raise where options of a broker contradict each other or lack a library, before anything starts."""
    kinds = ", ".join(repr(kind.value) for kind in Security)
    if acls and security is None:
        raise ConfigurationError(f"acls=True needs users to tell apart: give security= too, one of {kinds}")
    if users and (security is None or not security.has_passwords):
        raise ConfigurationError("users= has passwords, which take security='sasl_ssl' or security='sasl_plaintext'")
    if expired_certificate and (security is None or not security.has_tls):
        raise ConfigurationError(
            "expired_certificate=True needs a certificate: give security='sasl_ssl', 'ssl' or 'oauthbearer'"
        )
    for name, password in users.items():
        check_user(name, password)
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


def unsecured_token(name: str, lifetime: float = 300.0) -> tuple[str, float]:
    """Return an OAUTHBEARER token without a signature, as a broker with `security="oauthbearer"` takes it.

    It is what a client's `oauth_cb` returns: `{"oauth_cb": lambda _config: unsecured_token("orders")}`.

    Args:
        name: the user, its claim `sub`.
        lifetime: seconds until it expires.

    Returns:
        The token, and when it expires, in seconds since 1970.
    """
    now = time.time()
    parts = ({"alg": "none"}, {"sub": name, "iat": now, "exp": now + lifetime})
    head, claims = (base64.urlsafe_b64encode(json.dumps(part).encode()).decode().rstrip("=") for part in parts)
    return f"{head}.{claims}.", now + lifetime


def _quoted(text: str) -> str:
    r"""Quote a value for JAAS, whose reader (`StreamTokenizer`) knows backslashes, also as `\n`, but no line ends."""
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n").replace("\r", "\\r")
    return f'"{escaped}"'
