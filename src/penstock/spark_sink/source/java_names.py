"""Client settings by the Java client's names, as users of Spark's own Kafka source bring them, in librdkafka's names.

What has the same meaning is translated, what means nothing to this client is left out, and Java's key stores and logins
are refused with what to set instead. The client library refuses all other names that it does not have. No text here
repeats a value: it may be a secret.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from penstock.errors import ConfigurationError

#: Another name, the same values.
_RENAMED = {"fetch.max.wait.ms": "fetch.wait.max.ms", "request.timeout.ms": "socket.timeout.ms"}

#: What means nothing to a client that assigns partitions itself and is not Java's.
_MEANINGLESS = ("default.api.timeout.ms", "max.poll.records", "metric.reporters", "partition.assignment.strategy")

#: Names that are librdkafka's, too, and read PKCS#12.
_KEY_STORE = ("ssl.keystore.location", "ssl.keystore.password")

_LOGIN_OPTION = re.compile(r"""([\w.]+)\s*=\s*(?:(["'])((?:\\.|(?!\2).)*)\2|([^\s"';]+))""", re.DOTALL)

#: What to set instead, by how the names begin.
_INSTEAD = {
    "sasl.jaas.config": "set sasl.username and sasl.password, or sasl.kerberos.principal and sasl.kerberos.keytab, or "
    "sasl.oauthbearer.method=oidc with sasl.oauthbearer.client.id and sasl.oauthbearer.client.secret",
    "ssl.truststore.": "export the certificates as PEM (keytool -exportcert -rfc); ssl.ca.location names the file, "
    "ssl.ca.pem holds its text",
    "ssl.keystore.": "turn a JKS into PKCS#12 (keytool -importkeystore -deststoretype PKCS12) and set "
    "ssl.keystore.type=PKCS12; of PEM, ssl.certificate.location and ssl.key.location name the files",
}


def translated(client: Mapping[str, str]) -> dict[str, str]:
    """Return the settings in librdkafka's names; names are in lower case, without `kafka.`.

    A `ConfigurationError` names a setting that has no equivalent, or is given under both names.
    """
    made: dict[str, str] = {}
    for name, value in client.items():
        for new, text in _translation(name, value).items():
            if new in made or (new != name and new in client):
                raise ConfigurationError(
                    f"the option kafka.{name} says the same as kafka.{new}, its name in librdkafka; give one of them"
                )
            made[new] = text
    return made


def _translation(name: str, value: str) -> Mapping[str, str]:
    """Return what one of the settings is here."""
    if name in _MEANINGLESS or (name == "ssl.keystore.type" and value.strip().upper() == "PKCS12"):
        return {}
    if name == "ssl.endpoint.identification.algorithm":
        return {name: value.strip() or "none"}  # an empty text turns Java's check of the host's name off
    if name == "sasl.jaas.config" and (login := _login(value)):
        return login
    instead = next((text for beginning, text in _INSTEAD.items() if name.startswith(beginning)), None)
    if instead is not None and name not in _KEY_STORE:
        raise ConfigurationError(f"the option kafka.{name} is the Java client's and cannot be translated: {instead}")
    return {_RENAMED.get(name, name): value}


def _login(text: str) -> Mapping[str, str]:
    """Return the settings of a login by password; none of another one."""
    given = {}
    for option in _LOGIN_OPTION.finditer(text):
        given[option[1].lower()] = option[4] or re.sub(r"\\(.)", r"\1", option[3])
    if not given.keys() >= {"username", "password"}:
        return {}
    return {"sasl.username": given["username"], "sasl.password": given["password"]}
