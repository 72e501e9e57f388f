"""`penstock dlq` as a user with few rights: each that is missing is told, with the command that gives it."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
from confluent_kafka import Producer
from dead_letter_tools import origin_headers

from canary import MESSAGE, PAYLOAD
from commands import Command
from penstock.devbroker import DevBroker, User
from rights import give, on_group, on_topic


def as_user(monkeypatch: pytest.MonkeyPatch, user: User) -> None:
    """Let the clients of the commands be this user's."""
    monkeypatch.setenv("PENSTOCK_CONFIG", json.dumps({**user.config, "log_level": 0}))


def test_each_right_that_a_replay_lacks_is_told_until_it_has_them_all(
    secured: DevBroker,
    new_secured_topic: Callable[..., str],
    new_user: Callable[..., User],
    penstock_command: Command,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    original = new_secured_topic()
    letters = f"dlq.{original}"
    secured.create_topic(letters)
    producer = Producer(
        {**secured.admin_config, "bootstrap.servers": secured.bootstrap_servers, "enable.idempotence": True}
    )
    producer.produce(letters, MESSAGE, key=MESSAGE, headers=origin_headers(original))
    assert producer.flush(30) == 0
    user = new_user()
    as_user(monkeypatch, user)
    servers = ("--bootstrap-servers", secured.bootstrap_servers)

    read, group = f"--operation Read --topic '{letters}'", "--operation Read --group 'penstock-dlq-replay'"
    write = f"--operation Write --topic '{original}'"
    told = [(read, penstock_command("dlq", "replay", letters, *servers))]
    give(secured, user, [*on_topic(letters, "describe"), *on_topic(original, "describe")])
    told.append((read, penstock_command("dlq", "show", letters, *servers)))
    told.append((group, penstock_command("dlq", "replay", letters, *servers)))
    give(secured, user, on_topic(letters, "read"))
    shown = penstock_command("dlq", "show", letters, *servers)
    give(secured, user, on_group("penstock-dlq-replay", "read"))
    told.append((write, penstock_command("dlq", "replay", letters, *servers)))
    told.append((write, penstock_command("dlq", "replay", letters, "--to", original, *servers)))
    give(secured, user, on_topic(original, "write"))
    done = penstock_command("dlq", "replay", letters, *servers)

    for says, outcome in told:
        assert outcome.code == 1, outcome
        assert says in outcome.err
        assert f"User:{user.name} lacks" in outcome.err
        assert "unexpected" not in outcome.err
    assert (shown.code, done.code) == (0, 0), (shown, done)
    for outcome in (shown, done, *(outcome for _, outcome in told)):
        assert PAYLOAD not in outcome.out + outcome.err
