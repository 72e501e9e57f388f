"""The settings of a consumer, checked when they are made."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TypedDict

from confluent_kafka import OFFSET_BEGINNING, OFFSET_END

from penstock import options as check
from penstock.consumer.outbox.dead_letters import DeadLetterLimit
from penstock.errors import ConfigurationError
from penstock.option_list import refusing_removed
from penstock.options import ClientConfig

if TYPE_CHECKING:
    from penstock.telemetry import Telemetry

#: Client settings that only penstock sets, each with a hint for the user.
_OWNED = {
    "group.id": "give the group as `group`, or as the name of the App",
    "enable.auto.commit": "offsets are committed when their messages are done; see `commit_interval`",
    "enable.auto.offset.store": "offsets are committed when their messages are done; see `commit_interval`",
    "enable.partition.eof": "an end of a partition is not a message",
    "transactional.id": "an App with exactly_once=True has transactional ids of its own",
    "on_commit": "read `statistics()` for failed commits",
}
#: Most messages that the client returns from one call.
_MOST_FETCHED = 1_000_000
#: The most threads of a process, and lanes of a thread: each costs memory at the start.
_MOST_WORKERS = 10_000
#: Messages set aside may take a further part of `max_in_flight_bytes`: the value divided by this.
PARKED_SHARE = 4
_COOPERATIVE = "cooperative-sticky"
#: The client's setting for the interval of topic searches; below zero, no search after the start.
_SEARCH_EVERY_MS = "topic.metadata.refresh.interval.ms"
#: Seconds between two searches: the default, and the minimum. The client's own five minutes are long for a new topic.
SEARCH_EVERY_S = 30.0
_SEARCH_EVERY_LEAST_S = 0.1

#: Defaults of penstock, which the user's config overrides. With the client's own defaults, a full local queue stops
#: fetching for a whole second, and a fetch brings a megabyte of a partition. Together they leave a fast consumer idle
#: half of the time. The client waits a minute for a broker that does not answer before it tries again, and as long to
#: leave a group. A killed member keeps its partitions for 45 s. 15 s are five heartbeats. With the next heartbeat of
#: the others that is less than the 20 s after which the results of a killed member are settled.
_DEFAULTS = {
    "isolation.level": "read_committed",
    "fetch.queue.backoff.ms": 10,
    "socket.timeout.ms": 15_000,
    "max.partition.fetch.bytes": 4 * 1024 * 1024,
    "session.timeout.ms": 15_000,
}
#: The start of a partition without a committed offset, by the client's names; None: an error.
_RESETS = {
    **dict.fromkeys(("earliest", "smallest", "beginning"), OFFSET_BEGINNING),
    **dict.fromkeys(("latest", "largest", "end"), OFFSET_END),
    "error": None,
}


class Unchanged:
    """The type of `UNCHANGED`."""


#: Leaves an option unchanged, for options with None as a value.
UNCHANGED = Unchanged()


class LiveSettings(TypedDict, total=False):
    """The settings of a consumer that may change while it runs. A setting that is None or omitted stays unchanged."""

    workers: int | None
    max_concurrency: int | None
    max_in_flight: int | None
    max_in_flight_bytes: int | None
    commit_interval: float | None


#: The value of each setting that is omitted.
UNCHANGED_SETTINGS: Final[Mapping[str, None]] = dict.fromkeys(LiveSettings.__annotations__)


@dataclass(frozen=True, slots=True)
class ConsumerSettings:
    """The options of a consumer. All times in seconds.

    Attributes:
        workers: worker threads. May change while running.
        max_concurrency: `async def` handlers under way at once. May change while running.
        pinned: one lane for each worker, and a queue that it alone serves, for state that belongs to a thread.
        lanes_per_worker: lanes for each worker. With more lanes, a slow key delays fewer other keys. Each lane costs
            some microseconds when a worker takes it.
        max_in_flight: most messages of one partition that are taken in and not done. The partition pauses if it stays
            at the limit, and resumes at half. Until then it may take up to twice as many if other partitions have few.
            Messages set aside do not count, and have the same limit for themselves: messages that wait for a retry,
            for `key_rate`, for their dead letter, for a completion or for the time of a retry topic, and the messages
            behind them. May change while running.
        max_in_flight_bytes: most bytes of all messages taken in and not done. At the limit partitions pause, except
            for those with less than a quarter of their equal share. Messages set aside do not count, and may have a
            quarter of the limit. May change while running.
        commit_interval: time between two commits. May change while running.
        stop_timeout: how long a stop waits for the messages taken in, running handlers included.
        revoke_timeout: how long a revocation waits for running handlers of the revoked partitions, and for its commit.
        stall_after: how long a message may be in a handler before the watchdog reports it.
        time_limit: how long a call may take, for handlers without a limit of their own; None for no limit.
        dead_letter_limit: when the consumer stops instead of giving up one more message; None for no limit.
        fetch_size: most messages of one call of the client, which returns at most 1,000,000.
        run_seconds: a worker's time slice with one lane.
        telemetry: the destination of spans and metrics; None for none.
        exactly_once: whether results of handlers and the offsets of their messages are committed together, in Kafka
            transactions.
        transaction_interval: least time between two such transactions.
        config: librdkafka's keys as they are. Not part of `repr`, because it may hold passwords.
    """

    workers: int = 16
    max_concurrency: int = 1_000
    pinned: bool = False
    lanes_per_worker: int = 64
    max_in_flight: int = 10_000
    max_in_flight_bytes: int = 128 * 1024 * 1024
    commit_interval: float = 1.0
    stop_timeout: float = 25.0
    revoke_timeout: float = 5.0
    stall_after: float = 60.0
    time_limit: float | None = None
    dead_letter_limit: DeadLetterLimit | None = None
    fetch_size: int = 10_000
    run_seconds: float = 0.01
    telemetry: Telemetry | None = None
    exactly_once: bool = False
    transaction_interval: float = 0.1
    config: ClientConfig = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        """Check every option; raise `ConfigurationError` for the first wrong one."""
        for option in ("workers", "lanes_per_worker"):
            check.positive_int(option, getattr(self, option), _MOST_WORKERS)
        for option in ("max_concurrency", "max_in_flight", "max_in_flight_bytes"):
            check.positive_int(option, getattr(self, option))
        check.positive_int("fetch_size", self.fetch_size, _MOST_FETCHED)
        for option in ("commit_interval", "run_seconds", "stall_after", "transaction_interval"):
            check.seconds(option, getattr(self, option))
        if self.time_limit is not None:
            check.positive("time_limit", self.time_limit)
        for option in ("stop_timeout", "revoke_timeout"):
            check.seconds_or_zero(option, getattr(self, option))
        if self.dead_letter_limit is not None and not isinstance(self.dead_letter_limit, DeadLetterLimit):
            raise ConfigurationError(
                f"dead_letter_limit must be a DeadLetterLimit, but is {self.dead_letter_limit!r}; "
                "give penstock.DeadLetterLimit(consecutive=...) or (ratio=...)"
            )
        check.a_telemetry(self.telemetry)
        check.a_boolean("exactly_once", self.exactly_once)
        self._check_config()

    def _check_config(self) -> None:
        if not isinstance(self.config, Mapping):
            raise ConfigurationError(
                f"config must be a mapping of librdkafka's keys, but is a {type(self.config).__name__}"
            )
        check.reserved(self.config, _OWNED, "penstock")
        level = self.config.get("isolation.level")
        if self.exactly_once and not self.reads_committed_only:
            raise ConfigurationError(
                f"config['isolation.level'] is {level!r}, and with exactly_once a message that was rolled back would "
                "be handled and its results committed; leave it out"
            )
        for name in ("acks", "request.required.acks"):
            if (acks := self.config.get(name, "all")) not in {"all", "-1", -1}:
                raise ConfigurationError(
                    f"config[{name!r}] is {acks!r}, and a message counts as done only once all replicas have its "
                    "results or its dead letter; leave it out"
                )
        reset = self.config.get("auto.offset.reset", "earliest")
        if str(reset).lower() not in _RESETS:
            raise ConfigurationError(f"config['auto.offset.reset'] is {reset!r}; give 'earliest', 'latest' or 'error'")
        strategy = self.config.get("partition.assignment.strategy", _COOPERATIVE)
        if strategy != _COOPERATIVE:
            raise ConfigurationError(
                f"config['partition.assignment.strategy'] is {strategy!r}; penstock rebalances cooperatively: leave it "
                f"out, or use {_COOPERATIVE!r} or group.protocol=consumer"
            )

    @property
    def reads_committed_only(self) -> bool:
        """Whether only committed messages are read."""
        # The client ignores case.
        return str(self.config.get("isolation.level", "read_committed")).lower() == "read_committed"

    def client_config(self, group: str) -> dict[str, Any]:
        """Return the configuration of the Kafka consumer.

        Only committed messages are read, and a group without offsets starts at the earliest message, unless the
        user's config says otherwise.
        """
        defaults: dict[str, Any] = {**_DEFAULTS, "partition.assignment.strategy": _COOPERATIVE}
        if not check.is_classic(self.config):
            # In the newer protocol the brokers decide both, and the client refuses these keys.
            del defaults["session.timeout.ms"], defaults["partition.assignment.strategy"]
        instance = check.instance_id(self.config)
        return {
            **defaults,
            **self.config,
            **({} if instance is None else {"group.instance.id": instance}),
            "group.id": group,
            "enable.auto.commit": False,
            "enable.auto.offset.store": False,
            # penstock resets offsets itself: see `Positions`.
            "auto.offset.reset": "error",
        }

    @property
    def offset_reset(self) -> int | None:
        """The start of a partition without a committed offset, as a logical offset; None for an error."""
        return _RESETS[str(self.config.get("auto.offset.reset", "earliest")).lower()]

    @property
    def topic_search_interval(self) -> float | None:
        """Seconds between two searches for topics that match patterns; None for a search at the start only."""
        try:
            interval_ms = float(self.config[_SEARCH_EVERY_MS])
        except (KeyError, TypeError, ValueError):  # the client refuses other values than numbers
            return SEARCH_EVERY_S
        return max(_SEARCH_EVERY_LEAST_S, interval_ms / 1000) if interval_ms > 0 else None

    def producer_config(self) -> dict[str, Any]:
        """Return the configuration of the producer of results, dead letters and retries."""
        return {**_PRODUCER_DEFAULTS, **self.config, "enable.idempotence": True}


ConsumerSettings.__init__ = refusing_removed(ConsumerSettings.__init__)  # type: ignore[assignment] # the dataclass made it

#: `message.max.bytes` is the maximum of the client library: a message that could be read must not be refused for its
#: size. A topic's own limit applies to the compressed batch. So results are compressed, because a message that came
#: compressed must fit again. And batches are small, because messages that fit alone must not fail together. Nothing
#: times out, because absent brokers are no fault of a message. Added partitions of a result topic are noticed within
#: seconds: by default the client refuses them for five minutes. A deleted topic fails soon, as in a transaction.
_PRODUCER_DEFAULTS = {
    "message.max.bytes": 1_000_000_000,
    "compression.type": "zstd",
    "batch.size": 65_536,
    "linger.ms": 5,
    "message.timeout.ms": 0,
    _SEARCH_EVERY_MS: 10_000,
    "topic.metadata.propagation.max.ms": 3_000,
}
