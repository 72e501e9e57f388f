"""Settings by the Java client's names: the same meaning in librdkafka's words, or a refusal that says what to set."""

from __future__ import annotations

import traceback

import pytest

from penstock.errors import ConfigurationError
from penstock.spark_sink.source.options.java_names import translated
from penstock.spark_sink.source.options.options import SourceOptions

PLAIN = "org.apache.kafka.common.security.plain.PlainLoginModule required"
SCRAM = "org.apache.kafka.common.security.scram.ScramLoginModule required"
OAUTH = "org.apache.kafka.common.security.oauthbearer.OAuthBearerLoginModule required"


@pytest.mark.parametrize(
    ("java", "mine"),
    [
        ({"fetch.max.wait.ms": "50"}, {"fetch.wait.max.ms": "50"}),
        ({"request.timeout.ms": "5000"}, {"socket.timeout.ms": "5000"}),
        ({"receive.buffer.bytes": "65536"}, {"socket.receive.buffer.bytes": "65536"}),
        ({"receive.buffer.bytes": "-1"}, {}),
        ({"max.partition.fetch.bytes": "9"}, {"max.partition.fetch.bytes": "9"}),
        ({"ssl.endpoint.identification.algorithm": ""}, {"ssl.endpoint.identification.algorithm": "none"}),
        ({"ssl.truststore.type": "PEM", "ssl.truststore.location": "/ca"}, {"ssl.ca.location": "/ca"}),
        ({"ssl.truststore.type": "PEM", "ssl.truststore.certificates": "x"}, {"ssl.ca.pem": "x"}),
        (
            {"ssl.keystore.type": "PEM", "ssl.keystore.location": "/me"},
            {"ssl.certificate.location": "/me", "ssl.key.location": "/me"},
        ),
        (
            {"ssl.keystore.key": "k", "ssl.keystore.certificate.chain": "c", "ssl.keystore.type": "PEM"},
            {"ssl.key.pem": "k", "ssl.certificate.pem": "c"},
        ),
        (
            {"ssl.keystore.type": "pkcs12", "ssl.keystore.location": "/p", "ssl.keystore.password": "s"},
            {"ssl.keystore.location": "/p", "ssl.keystore.password": "s"},
        ),
        (
            {"sasl.jaas.config": f'{PLAIN} username="me" password="a \\"b\\" ; = c";'},
            {"sasl.username": "me", "sasl.password": 'a "b" ; = c'},
        ),
        (
            {"sasl.jaas.config": f"{SCRAM}\n  username='me'\n  password=plain ;"},
            {"sasl.username": "me", "sasl.password": "plain"},
        ),
        (
            {"sasl.jaas.config": f'{OAUTH} clientId="me" clientSecret="s" scope="read";'},
            {
                "sasl.oauthbearer.method": "oidc",
                "sasl.oauthbearer.client.id": "me",
                "sasl.oauthbearer.client.secret": "s",
                "sasl.oauthbearer.scope": "read",
            },
        ),
    ],
)
def test_a_java_setting_is_said_in_the_words_of_librdkafka(java: dict[str, str], mine: dict[str, str]) -> None:
    assert translated(java).client == mine


def test_what_means_nothing_here_is_left_out_by_name() -> None:
    told = translated({"max.poll.records": "9", "metric.reporters": "", "client.id": "me"})

    assert told.client == {"client.id": "me"}
    assert told.left_out == ("max.poll.records", "metric.reporters")


@pytest.mark.parametrize(
    ("setting", "value", "instead"),
    [
        ("ssl.truststore.location", "/canary-4711.jks", "ssl.ca.location"),
        ("ssl.truststore.password", "canary-4711", "ssl.ca.location"),
        ("sasl.jaas.config", "canary-4711", "sasl.username and sasl.password"),
        ("sasl.jaas.config", f'{PLAIN} username="me" password="canary-4711', "sasl.username and sasl.password"),
        ("sasl.jaas.config", f'{PLAIN} token="canary-4711";', "sasl.username and sasl.password"),
        ("sasl.jaas.config", 'com.x.Krb5LoginModule required keyTab="canary-4711";', "sasl.kerberos.keytab"),
    ],
)
def test_what_cannot_be_translated_is_refused_with_what_to_set_and_without_the_value(
    setting: str, value: str, instead: str
) -> None:
    with pytest.raises(ConfigurationError, match=rf"kafka\.{setting} is the Java client's.*{instead}") as raised:
        translated({setting: value})

    assert "canary-4711" not in "".join(traceback.format_exception(raised.value))


def test_a_java_key_store_is_to_be_turned_into_pkcs12() -> None:
    with pytest.raises(ConfigurationError, match="PKCS#12"):
        translated({"ssl.keystore.type": "JKS", "ssl.keystore.location": "/me.jks"})


def test_a_setting_under_both_names_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"kafka\.fetch\.max\.wait\.ms says the same as kafka\.fetch\.wait"):
        translated({"fetch.wait.max.ms": "1", "fetch.max.wait.ms": "2"})
    with pytest.raises(ConfigurationError, match=r"says the same as kafka\.sasl\.username"):
        translated({"sasl.jaas.config": f'{PLAIN} username="a" password="b";', "sasl.username": "c"})


def test_options_of_a_query_come_out_translated() -> None:
    jaas = {"kafka.sasl.jaas.config": f'{PLAIN} username="me" password="canary-4711";'}
    given = {
        "kafka.bootstrap.servers": "127.0.0.1:9092",
        "subscribe": "orders",
        "kafka.max.poll.records": "500",
        **jaas,
    }

    options = SourceOptions.parse(given)

    assert (options.client["sasl.username"], options.client["sasl.password"]) == ("me", "canary-4711")
    assert not {"sasl.jaas.config", "max.poll.records"} & options.client.keys()
    assert "canary-4711" not in repr(options)
