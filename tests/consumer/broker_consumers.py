"""Consumers on a real broker."""

from __future__ import annotations

from collections.abc import Callable

from penstock.consumer import ConsumerSettings, LitePushConsumer, handler
from penstock.devbroker import DevBroker
from penstock.message import Message

NewTopic = Callable[..., str]


def consumer_of(
    broker: DevBroker, topic: str, function: Callable[[Message], object], **settings: object
) -> LitePushConsumer:
    return LitePushConsumer(
        f"group-{topic}",
        {topic: handler(function)},
        bootstrap_servers=broker.bootstrap_servers,
        settings=ConsumerSettings(**{"workers": 8, "commit_interval": 0.1, **settings}),
    )
