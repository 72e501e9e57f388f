"""OAUTHBEARER on a real broker: the callback reaches every client of an app, and the library's own tokens do too."""

from __future__ import annotations

import pytest

from penstock import App, Message, clients
from penstock.devbroker import DevBroker, unsecured_token
from waiting import wait_until

UNSECURED = {"enable.sasl.oauthbearer.unsecure.jwt": "true", "sasl.oauthbearer.config": "principal=orders"}


@pytest.mark.thorough
@pytest.mark.parametrize("by", ["callback", pytest.param("library", marks=pytest.mark.chaos)])
def test_an_app_with_dead_letters_runs_with_tokens(by: str) -> None:
    with DevBroker(security="oauthbearer", start_timeout=150) as broker:
        connection = {"security.protocol": "SASL_SSL", "sasl.mechanism": "OAUTHBEARER"}
        connection["ssl.ca.location"] = str(broker.certificates.ca_path)
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
