"""Where a `HandlerSink` publishes: what of its settings goes to executors, and what is wrong with them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from penstock.clients import require_travelling
from penstock.clients.reading import without_membership
from penstock.consumer import Handler
from penstock.errors import ConfigurationError
from penstock.options import ClientConfig, not_empty
from penstock.spark_sink.sinks.kafka_ledger import Target, require_settings


def portable(config: ClientConfig) -> dict[str, Any]:
    """Return the client settings that executors get.

    Callbacks are this process's, and so is the log; credentials that come by one cannot be had elsewhere.
    """
    require_travelling("oauth_cb", config.get("oauth_cb", ""))
    return {key: value for key, value in config.items() if not callable(value) and key != "logger"}


def target_of(bootstrap_servers: str, config: ClientConfig, name: str, ledger_topic: str) -> Target:
    """Return where results are published; `ConfigurationError` where settings cannot be those of a publishing sink."""
    given = {key: value for key, value in without_membership(portable(config)).items() if key != "isolation.level"}
    require_settings("HandlerSink", bootstrap_servers, name, ledger_topic, given)
    # As an app's results: a key of one topic goes to the same partition from either engine.
    settings = {"partitioner": "consistent_random", "compression.type": "zstd", **given}
    return Target(bootstrap_servers, settings, name, ledger_topic)


def require_publishing(handlers: Mapping[str, Handler], name: str | None, servers: str | None, ledger: str) -> None:
    """Raise `ConfigurationError` where what handlers return has no topic to go to, or nothing to be remembered by."""
    for topic, one in handlers.items():
        if one.to is not None and name is None:
            raise ConfigurationError(
                f"the handler {one.name} of {topic} has to={one.to!r}; give the HandlerSink name=..., under which it "
                "remembers what it has published, and bootstrap_servers"
            )
        if one.to == ledger:
            raise ConfigurationError(
                f"the handler {one.name} of {topic} has to={one.to!r}, the topic of the ledger; rename one"
            )
    if name is None:
        return
    not_empty("name", name)
    if servers is None:
        raise ConfigurationError(f"the sink {name} publishes; give bootstrap_servers, where it does")
