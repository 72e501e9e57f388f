"""Client settings by the Java client's names, which Spark's own Kafka source takes, in the words of librdkafka.

What has the same meaning is translated. What means nothing here, such as a measure of the Java client's, is left out
and logged. Java's key stores and logins that cannot be translated are refused with what to use instead, and all other
names that librdkafka does not have by the library. No text here repeats a value: it may be a secret.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from penstock.errors import ConfigurationError

#: Another name, the same values.
_RENAMED = {
    "fetch.max.wait.ms": "fetch.wait.max.ms",
    "receive.buffer.bytes": "socket.receive.buffer.bytes",
    "request.timeout.ms": "socket.timeout.ms",
    "send.buffer.bytes": "socket.send.buffer.bytes",
    "ssl.keystore.certificate.chain": "ssl.certificate.pem",
    "ssl.keystore.key": "ssl.key.pem",
    "ssl.truststore.certificates": "ssl.ca.pem",
}

#: Settings that do nothing for a source that assigns partitions itself, on a client that is not Java's.
_MEANINGLESS = (
    "auto.include.jmx.reporter",
    "default.api.timeout.ms",
    "exclude.internal.topics",
    "max.poll.records",
    "metric.reporters",
    "metrics.num.samples",
    "metrics.recording.level",
    "metrics.sample.window.ms",
    "partition.assignment.strategy",
)

_LOGIN_MODULE = re.compile(r"\s*(?P<name>[\w.$]+)\s+\w+\s+(?P<options>.*?);?\s*", re.DOTALL)
_LOGIN_OPTION = re.compile(r"""([\w.]+)\s*=\s*(?:"((?:[^"\\]|\\.)*)"|'((?:[^'\\]|\\.)*)'|([^\s"';]+))\s*""")
_PASSWORD_MODULES = ("PlainLoginModule", "ScramLoginModule")


@dataclass(frozen=True, slots=True)
class Translation:
    """Settings as librdkafka knows them, and the names of those left out."""

    client: dict[str, str]
    left_out: tuple[str, ...]


def translated(client: Mapping[str, str]) -> Translation:
    """Return the settings in librdkafka's words; names are in lower case, without `kafka.`.

    A `ConfigurationError` names a setting that has no like in librdkafka, or is given under both names.
    """
    mine: dict[str, str] = {}
    left_out: list[str] = []
    for name, value in client.items():
        if name in _MEANINGLESS:
            left_out.append(name)
            continue
        for new, text in _translation_of(name, value, client).items():
            if new in mine or (new != name and new in client):
                raise ConfigurationError(
                    f"the option kafka.{name} says the same as kafka.{new}, its name in librdkafka; give one of them"
                )
            mine[new] = text
    return Translation(mine, tuple(sorted(left_out)))


def _translation_of(name: str, value: str, client: Mapping[str, str]) -> Mapping[str, str]:
    """Return what one setting is here, seen beside the others."""
    if name == "sasl.jaas.config":
        return _login(value)
    if name == "ssl.endpoint.identification.algorithm":
        return {name: value.strip() or "none"}  # Java says "do not look at the name" by an empty text
    if name.startswith(("ssl.truststore.", "ssl.keystore.")) and name not in _RENAMED:
        return _store(name, value, client)
    if name in ("receive.buffer.bytes", "send.buffer.bytes") and value.strip() == "-1":
        return {}  # Java's word for what the system says, which is the default here
    return {_RENAMED.get(name, name): value}


def _store(name: str, value: str, client: Mapping[str, str]) -> Mapping[str, str]:
    """Return a Java key store or trust store as files librdkafka reads."""
    trust = name.startswith("ssl.truststore.")
    kind = client.get("ssl.truststore.type" if trust else "ssl.keystore.type", "").strip().upper()
    setting = name.rpartition(".")[2]
    if setting == "type" and kind in ({"PEM"} if trust else {"PEM", "PKCS12"}):
        return {}
    if kind == "PEM" and setting == "location":
        return {"ssl.ca.location": value} if trust else {"ssl.certificate.location": value, "ssl.key.location": value}
    if not trust and kind in ("", "PKCS12"):
        return {name: value}  # librdkafka reads PKCS#12 under the same names
    if trust:
        raise _refusal(
            name, "export the certificates as PEM (keytool -exportcert -rfc); ssl.ca.location names the file"
        )
    raise _refusal(
        name, "turn it into PKCS#12 (keytool -importkeystore -deststoretype PKCS12) and set ssl.keystore.type=PKCS12"
    )


def _login(text: str) -> Mapping[str, str]:
    wrong = _refusal("sasl.jaas.config", "it has a shape that is not understood; set sasl.username and sasl.password")
    found = _LOGIN_MODULE.fullmatch(text)
    if found is None:
        raise wrong
    options: dict[str, str] = {}
    rest = found["options"]
    while rest:
        option = _LOGIN_OPTION.match(rest)
        if option is None:
            raise wrong
        quoted = option[2] if option[2] is not None else option[3]
        options[option[1].lower()] = option[4] if quoted is None else re.sub(r"\\(.)", r"\1", quoted)
        rest = rest[option.end() :]
    module = found["name"].rpartition(".")[2]
    if module in _PASSWORD_MODULES and options.keys() >= {"username", "password"}:
        return {"sasl.username": options["username"], "sasl.password": options["password"]}
    if module == "OAuthBearerLoginModule" and options.keys() >= {"clientid", "clientsecret"}:
        settings = {
            "sasl.oauthbearer.method": "oidc",
            "sasl.oauthbearer.client.id": options["clientid"],
            "sasl.oauthbearer.client.secret": options["clientsecret"],
        }
        return settings | ({"sasl.oauthbearer.scope": options["scope"]} if "scope" in options else {})
    if module == "Krb5LoginModule":
        raise _refusal("sasl.jaas.config", "set sasl.kerberos.principal and sasl.kerberos.keytab")
    raise wrong


def _refusal(name: str, instead: str) -> ConfigurationError:
    return ConfigurationError(f"the option kafka.{name} is the Java client's and cannot be translated: {instead}")
