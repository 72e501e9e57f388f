"""Options of handlers that a `HandlerSink` cannot keep: those that speak of one process that goes on."""

from __future__ import annotations

from penstock.consumer import Handler, OnFailure
from penstock.errors import ConfigurationError


def refuse_what_cannot_be_kept(topic: str, one: Handler) -> None:
    """Raise `ConfigurationError` for a handler with an option that tasks, which are many and end, cannot keep."""
    if not isinstance(one, Handler):
        raise ConfigurationError(
            f"the handler of {topic} must be made by penstock.consumer.handler(...), but is a {type(one).__name__}"
        )
    name = f"the handler {one.name} of {topic}"
    if one.retry_delays:
        raise ConfigurationError(
            f"{name} has retry_delays, but a query does not read retry topics; use retry=, or a consumer"
        )
    if one.on_failure is OnFailure.HOLD:
        raise ConfigurationError(
            f"{name} has on_failure='hold', but a batch ends only when all of its messages are done; use 'stop', "
            "'dead_letter' or 'drop', or a consumer"
        )
    if one.rate is not None or one.key_rate is not None:
        raise ConfigurationError(
            f"{name} has a rate, which executors cannot share; bound a query by maxOffsetsPerTrigger and its trigger"
        )
    if one.deferred_timeout is not None:
        raise ConfigurationError(
            f"{name} has deferred_timeout, but a completion cannot be put off on an executor, whose process may end "
            "before it comes; return when the message is done"
        )
