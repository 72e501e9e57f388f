"""Settings by the Java client's names: the same meaning in librdkafka's words, or a refusal that says what to set."""

from __future__ import annotations

import traceback

import pytest

from penstock.errors import ConfigurationError
from penstock.spark_sink.source.java_names import translated
from penstock.spark_sink.source.options import SourceOptions

PLAIN = "org.apache.kafka.common.security.plain.PlainLoginModule required"
SCRAM = "org.apache.kafka.common.security.scram.ScramLoginModule required"
JAAS, TRUST, KEYS = "sasl.jaas.config", "ssl.truststore", "ssl.keystore"


@pytest.mark.parametrize(
    ("java", "mine"),
    [
        ({"request.timeout.ms": "5000", "client.id": "me"}, {"socket.timeout.ms": "5000", "client.id": "me"}),
        ({"max.poll.records": "9", "metric.reporters": ""}, {}),
        ({"ssl.endpoint.identification.algorithm": ""}, {"ssl.endpoint.identification.algorithm": "none"}),
        (
            {f"{KEYS}.type": "pkcs12", f"{KEYS}.location": "/p", f"{KEYS}.password": "s"},
            {f"{KEYS}.location": "/p", f"{KEYS}.password": "s"},
        ),
        (
            {JAAS: f'{PLAIN} username="me" password="a \\"b\\" ; = c";'},
            {"sasl.username": "me", "sasl.password": 'a "b" ; = c'},
        ),
        (
            {JAAS: f"{SCRAM}\n  username='me'\n  password=plain ;"},
            {"sasl.username": "me", "sasl.password": "plain"},
        ),
    ],
)
def test_a_java_setting_is_said_in_the_words_of_librdkafka(java: dict[str, str], mine: dict[str, str]) -> None:
    assert translated(java) == mine


@pytest.mark.parametrize(
    ("setting", "value", "instead"),
    [
        (f"{TRUST}.location", "/canary-4711.jks", "ssl.ca.location"),
        (f"{KEYS}.type", "canary-4711", "PKCS#12"),
        (f"{KEYS}.certificate.chain", "canary-4711", "ssl.certificate.location"),
        (JAAS, "canary-4711", "sasl.username and sasl.password"),
        (JAAS, f'{PLAIN} username="me" password="canary-4711', "sasl.username and sasl.password"),
        (JAAS, 'com.x.OAuthBearer required clientSecret="canary-4711";', "sasl.oauthbearer.client.secret"),
        (JAAS, 'com.x.Krb5LoginModule required keyTab="canary-4711";', "sasl.kerberos.keytab"),
    ],
)
def test_what_cannot_be_translated_is_refused_with_what_to_set_and_without_the_value(
    setting: str, value: str, instead: str
) -> None:
    given = {"kafka.bootstrap.servers": "127.0.0.1:9092", "subscribe": "orders", f"kafka.{setting}": value}

    with pytest.raises(ConfigurationError, match=rf"kafka\.{setting} is the Java client's.*{instead}") as raised:
        SourceOptions.parse(given)

    assert "canary-4711" not in "".join(traceback.format_exception(raised.value))


def test_a_setting_under_both_names_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"kafka\.fetch\.max\.wait\.ms says the same as kafka\.fetch\.wait"):
        translated({"fetch.wait.max.ms": "1", "fetch.max.wait.ms": "2"})
    with pytest.raises(ConfigurationError, match=r"says the same as kafka\.sasl\.username"):
        translated({JAAS: f'{PLAIN} username="a" password="b";', "sasl.username": "c"})
