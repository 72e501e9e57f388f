"""What a consumer can be told: its options and its handlers, checked when they are made."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from penstock import config as check
from penstock.config import ClientConfig
from penstock.consumer.ordering import Keyless, Order
from penstock.consumer.retries import RetryPolicy, retry
from penstock.errors import ConfigurationError
from penstock.message import Message

HandlerFunction = Callable[[Message], object]

#: Client settings that penstock holds itself, and what to use in their place.
_OWNED = {
    "group.id": "give the group as `group`, or as the name of the App",
    "enable.auto.commit": "offsets are committed when their messages are done; see `commit_interval`",
    "enable.auto.offset.store": "offsets are committed when their messages are done; see `commit_interval`",
    "enable.partition.eof": "an end of a partition is not a message",
    "on_commit": "read `statistics()` for failed commits",
}
_COOPERATIVE = "cooperative-sticky"

#: What penstock sets unless the user does. By the client's own defaults a full local queue stops fetching for a whole
#: second, and a fetch brings a megabyte of a partition: together they leave a fast consumer idle half of the time.
_DEFAULTS = {
    "isolation.level": "read_committed",
    "auto.offset.reset": "earliest",
    "fetch.queue.backoff.ms": 10,
    "max.partition.fetch.bytes": 4 * 1024 * 1024,
}


class OnFailure(Enum):
    """What becomes of a message whose retries are exhausted."""

    DEAD_LETTER = "dead_letter"
    DROP = "drop"
    STOP = "stop"


@dataclass(frozen=True, slots=True)
class Handler:
    """A function and how messages are given to it. Made by `handler`.

    Attributes:
        function: called with each message, on a worker thread.
        order: which messages wait for each other.
        keyless: how messages without a key are ordered under `Order.KEY`.
        retry: whether and when a failed message is tried again.
        on_failure: what becomes of a message whose retries are exhausted.
        dead_letter_topic: where dead letters go; `{topic}` stands for the message's topic.
    """

    function: HandlerFunction
    order: Order
    keyless: Keyless
    retry: RetryPolicy
    on_failure: OnFailure
    dead_letter_topic: str

    @property
    def name(self) -> str:
        """The function's name, for logs and reports."""
        return getattr(self.function, "__qualname__", type(self.function).__name__)


def handler(
    function: HandlerFunction,
    *,
    order: str | Order = Order.KEY,
    keyless: str | Keyless = Keyless.PARTITION,
    retry_policy: RetryPolicy | None = None,
    dead_letter: bool | str = False,
    dead_letter_topic: str = "dlq.{topic}",
) -> Handler:
    """Check what a user gave for a handler and return it in one piece.

    Args:
        function: called with each message; what it returns is ignored, what it raises is a failure.
        order: "key" (default), "partition" or "none".
        keyless: "partition" (default), "together" or "spread".
        retry_policy: made by `penstock.retry`; five tries with growing waits when left out.
        dead_letter: what becomes of a message whose retries are exhausted. True: it goes to the dead-letter topic.
            "drop": it is logged and counted. "stop", or False (default): the consumer stops and keeps the offset.
        dead_letter_topic: name of the dead-letter topic.

    Raises:
        ConfigurationError: one of them is wrong.
    """
    check.a_callable("handler", function)
    called = function if inspect.isroutine(function) else getattr(function, "__call__", function)  # noqa: B004 - the bound method is what is inspected
    if inspect.iscoroutinefunction(called):
        raise ConfigurationError(
            f"handler {getattr(function, '__qualname__', function)!s} is an `async def`, which this version does not "
            "run; make it a plain function"
        )
    if retry_policy is not None and not isinstance(retry_policy, RetryPolicy):
        raise ConfigurationError(
            f"retry must be made by penstock.retry(...), but is a {type(retry_policy).__name__}; "
            "pass tenacity's stop, wait and retry objects to penstock.retry"
        )
    if dead_letter is True:
        on_failure = OnFailure.DEAD_LETTER
        check.not_empty("dead_letter_topic", dead_letter_topic)
    elif dead_letter is False:
        on_failure = OnFailure.STOP
    else:
        on_failure = check.choice("dead_letter", dead_letter, OnFailure)
    return Handler(
        function,
        check.choice("order", order, Order),
        check.choice("keyless", keyless, Keyless),
        retry_policy or retry(),
        on_failure,
        dead_letter_topic,
    )


@dataclass(frozen=True, slots=True)
class ConsumerSettings:
    """The options of a consumer. All times in seconds.

    Attributes:
        workers: worker threads.
        pinned: one lane for each worker, which alone serves it, for state that belongs to a thread.
        lanes_per_worker: lanes for each worker; more delay fewer neighbours of a slow key.
        max_in_flight: messages of one partition that may be taken in and not done; the partition pauses there and
            resumes at half.
        max_in_flight_bytes: bytes of all messages taken in and not done; all partitions pause there.
        commit_interval: how often the commit points are committed.
        stop_timeout: how long a stop waits for what was taken in.
        revoke_timeout: how long a revocation waits for running handlers of the revoked partitions.
        fetch_size: messages taken from the client in one go, at most.
        run_seconds: a worker's time slice with one lane.
        config: librdkafka's keys as they are.
    """

    workers: int = 16
    pinned: bool = False
    lanes_per_worker: int = 64
    max_in_flight: int = 10_000
    max_in_flight_bytes: int = 128 * 1024 * 1024
    commit_interval: float = 1.0
    stop_timeout: float = 30.0
    revoke_timeout: float = 5.0
    fetch_size: int = 10_000
    run_seconds: float = 0.01
    config: ClientConfig = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check every option; raise `ConfigurationError` for the first that is wrong."""
        for option in ("workers", "lanes_per_worker", "max_in_flight", "max_in_flight_bytes", "fetch_size"):
            check.positive_int(option, getattr(self, option))
        for option in ("commit_interval", "run_seconds"):
            check.positive(option, getattr(self, option))
        for option in ("stop_timeout", "revoke_timeout"):
            check.not_negative(option, getattr(self, option))
        if not isinstance(self.config, Mapping):
            raise ConfigurationError(
                f"config must be a mapping of librdkafka's keys, but is a {type(self.config).__name__}"
            )
        check.reserved(self.config, _OWNED, "penstock")
        strategy = self.config.get("partition.assignment.strategy", _COOPERATIVE)
        if strategy != _COOPERATIVE:
            raise ConfigurationError(
                f"config['partition.assignment.strategy'] is {strategy!r}; penstock rebalances cooperatively: leave it "
                f"out, or use {_COOPERATIVE!r} or group.protocol=consumer"
            )

    def client_config(self, group: str) -> dict[str, Any]:
        """Return the configuration of the Kafka consumer.

        Only committed messages are read, and a group without offsets starts at the earliest message, unless the
        user's config says otherwise.
        """
        protocol = {}
        if self.config.get("group.protocol", "classic") == "classic":
            protocol["partition.assignment.strategy"] = _COOPERATIVE
        return {
            **_DEFAULTS,
            **protocol,
            **self.config,
            "group.id": group,
            "enable.auto.commit": False,
            "enable.auto.offset.store": False,
        }


__all__ = ["ConsumerSettings", "Handler", "HandlerFunction", "OnFailure", "handler"]
