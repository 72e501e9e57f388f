"""The handler sink of an app: its handlers, with what the app says of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from penstock.consumer import ConsumerSettings, Handler, MiddlewareSpec, WorkerResource
from penstock.errors import ConfigurationError
from penstock.spark_sink.sinks.handlers.sink import HandlerSink
from penstock.spark_sink.sinks.kafka_ledger import LEDGER_TOPIC

#: What runs around an app's handlers: its middlewares, lifespans and worker resources.
HandlerEnvironment = tuple[Sequence[MiddlewareSpec], Sequence[Callable[[], Any]], Sequence[WorkerResource[Any]]]


def sink_of(
    app: str,
    handlers: Mapping[str, Handler | None],
    settings: ConsumerSettings,
    bootstrap_servers: str,
    environment: HandlerEnvironment,
    *,
    parallelism: int,
    headers: bool,
    name: str | None,
    ledger_topic: str | None,
    atomic_batches: bool,
    overlap: Literal["refused", "allowed"],
) -> HandlerSink:
    """Return a sink with an app's handlers, limits and environment.

    A topic without a handler, or a handler that cannot be kept on executors, is a `ConfigurationError`.
    """
    missing = sorted(topic for topic, one in handlers.items() if one is None)
    if missing:
        raise ConfigurationError(
            f"app {app} has no handler for {', '.join(missing)}; register it with @app.handler before the sink is made"
        )
    middlewares, lifespans, resources = environment
    return HandlerSink(
        {topic: one for topic, one in handlers.items() if one is not None},
        group=app,
        parallelism=parallelism,
        bootstrap_servers=bootstrap_servers,
        config=settings.config,
        middlewares=middlewares,
        lifespans=lifespans,
        resources=resources,
        max_concurrency=settings.max_concurrency,
        max_parked=settings.max_parked,
        max_parked_bytes=settings.max_parked_bytes,
        dead_letter_limit=settings.dead_letter_limit,
        headers=headers,
        telemetry=settings.telemetry,
        name=name,
        ledger_topic=LEDGER_TOPIC if ledger_topic is None else ledger_topic,
        atomic_batches=atomic_batches,
        overlap=overlap,
    )
