"""Client settings by the Java client's names, as users of Spark's own Kafka source bring them, in librdkafka's names.

What has the same meaning is translated, what means nothing to this client is left out, and Java's key stores and logins
that cannot be translated are refused with what to set instead. The client library refuses all other names that it does
not have. No text here repeats a value: it may be a secret.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from penstock.errors import ConfigurationError

#: Another name, the same values.
_RENAMED = {
    "fetch.max.wait.ms": "fetch.wait.max.ms",
    "request.timeout.ms": "socket.timeout.ms",
    "ssl.keystore.certificate.chain": "ssl.certificate.pem",
    "ssl.keystore.key": "ssl.key.pem",
    "ssl.truststore.certificates": "ssl.ca.pem",
}

#: What means nothing to a client that assigns partitions itself and is not Java's.
_MEANINGLESS = ("default.api.timeout.ms", "max.poll.records", "metric.reporters", "partition.assignment.strategy")

#: The options of login modules.
_LOGIN = {
    "username": "sasl.username",
    "password": "sasl.password",
    "clientid": "sasl.oauthbearer.client.id",
    "clientsecret": "sasl.oauthbearer.client.secret",
    "scope": "sasl.oauthbearer.scope",
}
_LOGIN_OPTION = re.compile(r"""([\w.]+)\s*=\s*(?:(["'])((?:\\.|(?!\2).)*)\2|([^\s"';]+))""", re.DOTALL)

#: What to set instead.
_INSTEAD = {
    "sasl.jaas.config": "set sasl.username and sasl.password, or sasl.kerberos.principal and sasl.kerberos.keytab",
    "ssl.truststore": "export the certificates as PEM (keytool -exportcert -rfc); ssl.ca.location names the file",
    "ssl.keystore": "turn it into PKCS#12 (keytool -importkeystore -deststoretype PKCS12) and set "
    "ssl.keystore.type=PKCS12",
}


def translated(client: Mapping[str, str]) -> dict[str, str]:
    """Return the settings in librdkafka's names; names are in lower case, without `kafka.`.

    A `ConfigurationError` names a setting that has no equivalent, or is given under both names.
    """
    made: dict[str, str] = {}
    for name, value in client.items():
        for new, text in _translation(name, value, client).items():
            if new in made or (new != name and new in client):
                raise ConfigurationError(
                    f"the option kafka.{name} says the same as kafka.{new}, its name in librdkafka; give one of them"
                )
            made[new] = text
    return made


def _translation(name: str, value: str, client: Mapping[str, str]) -> Mapping[str, str]:
    """Return what one of the settings is here."""
    if name in _MEANINGLESS:
        return {}
    if name == "sasl.jaas.config":
        return _login(value)
    if name == "ssl.endpoint.identification.algorithm":
        return {name: value.strip() or "none"}  # an empty text turns Java's check of the host's name off
    if name.startswith(("ssl.truststore.", "ssl.keystore.")) and name not in _RENAMED:
        return _of_store(name, value, client)
    return {_RENAMED.get(name, name): value}


def _of_store(name: str, value: str, client: Mapping[str, str]) -> Mapping[str, str]:
    """Return a setting of a trust store or key store: librdkafka reads PEM, and PKCS#12 under the same names."""
    store, _, setting = name.rpartition(".")
    kind = client.get(f"{store}.type", "").strip().upper()
    is_trust = store == "ssl.truststore"
    if kind == "PEM" and setting == "location":
        return dict.fromkeys(
            ["ssl.ca.location"] if is_trust else ["ssl.certificate.location", "ssl.key.location"], value
        )
    if setting == "type" and kind in ({"PEM"} if is_trust else {"PEM", "PKCS12"}):
        return {}
    if not is_trust and kind in {"", "PKCS12"}:
        return {name: value}
    raise _refusal(name, _INSTEAD[store])


def _login(text: str) -> Mapping[str, str]:
    """Return the settings of a login by password or by client secret."""
    given = {}
    for option in _LOGIN_OPTION.finditer(text):
        given[option[1].lower()] = option[4] or re.sub(r"\\(.)", r"\1", option[3])
    settings = {new: given[name] for name, new in _LOGIN.items() if name in given}
    if given.keys() >= {"clientid", "clientsecret"}:
        return {"sasl.oauthbearer.method": "oidc", **settings}
    if given.keys() >= {"username", "password"}:
        return settings
    raise _refusal("sasl.jaas.config", _INSTEAD["sasl.jaas.config"])


def _refusal(name: str, instead: str) -> ConfigurationError:
    return ConfigurationError(f"the option kafka.{name} is the Java client's and cannot be translated: {instead}")
