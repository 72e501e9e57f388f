"""What a `HandlerSink` cannot be made of, each refused with the remedy, and where it publishes."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.clients import portable
from penstock.clients.reading import without_membership
from penstock.consumer import Handler, OnFailure
from penstock.errors import ConfigurationError
from penstock.options import ClientConfig, not_empty
from penstock.spark_sink.sinks.kafka_ledger import Target, require_settings


def refuse_what_cannot_be_kept(topic: str, handler: Handler) -> None:
    """Raise `ConfigurationError` for a handler with an option that tasks, which are many and end, cannot keep."""
    if not isinstance(handler, Handler):
        raise ConfigurationError(
            f"the handler of {topic} must be made by penstock.consumer.handler(...), but is a {type(handler).__name__}"
        )
    name = f"the handler {handler.name} of {topic}"
    if handler.retry_delays:
        raise ConfigurationError(
            f"{name} has retry_delays, but a query does not read retry topics; use retry=, or a consumer"
        )
    if handler.on_failure is OnFailure.HOLD:
        raise ConfigurationError(
            f"{name} has on_failure='hold', but a batch ends only when all of its messages are done; use 'stop', "
            "'dead_letter' or 'drop', or a consumer"
        )
    if handler.rate is not None or handler.key_rate is not None:
        raise ConfigurationError(
            f"{name} has a rate, which executors cannot share; bound a query by maxOffsetsPerTrigger and its trigger"
        )


def require_publishing(handlers: Mapping[str, Handler], name: str | None, servers: str | None, ledger: str) -> None:
    """Raise `ConfigurationError` where what handlers return has no topic to go to, or nothing to be remembered by."""
    for topic, handler in handlers.items():
        if handler.to is not None and name is None:
            raise ConfigurationError(
                f"the handler {handler.name} of {topic} has to={handler.to!r}; give the HandlerSink name=..., under "
                "which it remembers what it has published, and bootstrap_servers"
            )
        if handler.to == ledger:
            raise ConfigurationError(
                f"the handler {handler.name} of {topic} has to={handler.to!r}, the topic of the ledger; rename one"
            )
    if name is None:
        return
    not_empty("name", name)
    if servers is None:
        raise ConfigurationError(f"the sink {name} publishes; give bootstrap_servers, where it does")


def target_of(bootstrap_servers: str, config: ClientConfig, name: str, ledger_topic: str) -> Target:
    """Return where results are published; `ConfigurationError` where settings cannot be those of a publishing sink."""
    given = {key: value for key, value in without_membership(portable(config)).items() if key != "isolation.level"}
    require_settings("HandlerSink", bootstrap_servers, name, ledger_topic, given)
    # As an app's results: a key of one topic goes to the same partition from either engine.
    settings = {"partitioner": "consistent_random", "compression.type": "zstd", **given}
    return Target(bootstrap_servers, settings, name, ledger_topic)
