"""OAUTHBEARER on a real broker: the callback reaches every client of an app, and the library's own tokens do too."""

from __future__ import annotations

import base64
import json
import time

import pytest

from penstock import App, Message, clients
from penstock.devbroker import DevBroker
from waiting import wait_until

UNSECURED = {"enable.sasl.oauthbearer.unsecure.jwt": "true", "sasl.oauthbearer.config": "principal=orders"}
#: Settings of a broker that takes tokens without a signature as well as passwords.
WITH_TOKENS = {
    "listener.name.client.sasl.enabled.mechanisms": "SCRAM-SHA-512,OAUTHBEARER",
    "listener.name.client.oauthbearer.sasl.jaas.config": (
        "org.apache.kafka.common.security.oauthbearer.OAuthBearerLoginModule required "
        'unsecuredLoginStringClaim_sub="admin";'
    ),
}


def unsecured_token(name: str, lifetime: float = 300.0) -> tuple[str, float]:
    """Return a token without a signature, whose claim `sub` is the user, and when it expires."""
    now = time.time()
    parts = ({"alg": "none"}, {"sub": name, "iat": now, "exp": now + lifetime})
    head, claims = (base64.urlsafe_b64encode(json.dumps(part).encode()).decode().rstrip("=") for part in parts)
    return f"{head}.{claims}.", now + lifetime


@pytest.mark.thorough
@pytest.mark.parametrize("by", ["callback", pytest.param("library", marks=pytest.mark.chaos)])
def test_an_app_with_dead_letters_runs_with_tokens(by: str) -> None:
    with DevBroker(security="sasl_ssl", config=WITH_TOKENS) as broker:
        connection = {"security.protocol": "SASL_SSL", "sasl.mechanism": "OAUTHBEARER"}
        connection["ssl.ca.location"] = broker.admin_config["ssl.ca.location"]
        tokens = {"oauth_cb": lambda _: unsecured_token("orders")} if by == "callback" else UNSECURED
        config = {**connection, **tokens}
        broker.create_topic("orders")
        seen: list[Message] = []
        app = App("shop", bootstrap_servers=broker.bootstrap_servers, config=config)
        app.handler("orders", on_failure="dead_letter")(seen.append)

        with app.start():
            producer = clients.producer(broker.bootstrap_servers, config)
            producer.produce("orders", b"one")
            assert producer.flush(60) == 0
            wait_until(lambda: len(seen) == 1)

    assert seen[0].value == b"one"
