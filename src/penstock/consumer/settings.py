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

#: Client settings that penstock holds itself, and what to use in their place.
_OWNED = {
    "group.id": "give the group as `group`, or as the name of the App",
    "enable.auto.commit": "offsets are committed when their messages are done; see `commit_interval`",
    "enable.auto.offset.store": "offsets are committed when their messages are done; see `commit_interval`",
    "enable.partition.eof": "an end of a partition is not a message",
    "transactional.id": "an App with exactly_once=True has transactional ids of its own",
    "on_commit": "read `statistics()` for failed commits",
}
#: Messages that the client hands over in one call, at most.
_MOST_FETCHED = 1_000_000
#: The part of `max_in_flight_bytes` that what is set aside may take besides: one in so many.
PARKED_SHARE = 4
_COOPERATIVE = "cooperative-sticky"
#: The client's setting that says how often topics are searched for; below zero, never again.
_SEARCH_EVERY_MS = "topic.metadata.refresh.interval.ms"
#: Seconds between two searches by default, and at least. The client's own five minutes are long for a new topic.
SEARCH_EVERY_S = 30.0
_SEARCH_EVERY_LEAST_S = 0.1

#: What penstock sets unless the user does. By the client's own defaults a full local queue stops fetching for a whole
#: second, and a fetch brings a megabyte of a partition: together they leave a fast consumer idle half of the time. It
#: waits a minute for a broker that does not answer, before it tries again, and as long to leave a group. And a member
#: that was killed keeps its partitions for 45 s: 15 s are five heartbeats, and with the next heartbeat of the others
#: less than the 20 s after which the results of a killed member are settled.
_DEFAULTS = {
    "isolation.level": "read_committed",
    "fetch.queue.backoff.ms": 10,
    "socket.timeout.ms": 15_000,
    "max.partition.fetch.bytes": 4 * 1024 * 1024,
    "session.timeout.ms": 15_000,
}
#: Where a partition begins that the group has no offset of, by the client's names; None: nowhere.
_RESETS = {
    **dict.fromkeys(("earliest", "smallest", "beginning"), OFFSET_BEGINNING),
    **dict.fromkeys(("latest", "largest", "end"), OFFSET_END),
    "error": None,
}


class Unchanged:
    """Stands for a setting that is left as it is, where None is a value."""


#: Stands for an option that is left as it is, where None means something.
UNCHANGED = Unchanged()


class LiveSettings(TypedDict, total=False):
    """The settings of a consumer that may change while it runs; None, and what is left out, stays as it is."""

    workers: int | None
    max_concurrency: int | None
    max_in_flight: int | None
    max_in_flight_bytes: int | None
    commit_interval: float | None


#: What counts for a setting that is left out.
UNCHANGED_SETTINGS: Final[Mapping[str, None]] = dict.fromkeys(LiveSettings.__annotations__)


@dataclass(frozen=True, slots=True)
class ConsumerSettings:
    """The options of a consumer. All times in seconds.

    Attributes:
        workers: worker threads. May change while running.
        max_concurrency: `async def` handlers under way at once. May change while running.
        pinned: one lane for each worker, and a queue that it alone serves, for state that belongs to a thread.
        lanes_per_worker: lanes for each worker; more delay fewer neighbours of a slow key, and each costs some
            microseconds when a worker takes it.
        max_in_flight: messages of one partition that may be taken in and not done; the partition pauses when it stays
            there, and resumes at half; until then it may take up to twice as many where others have few. What is set
            aside is left out and has the same limit for itself: for a retry, for `key_rate`, for a dead letter to be
            written, for a completion or the time of a retry topic, or behind such a message. May change while running.
        max_in_flight_bytes: bytes of all messages taken in and not done; partitions pause there, save those that hold
            less than a quarter of their even part. What is set aside is left out, and limited to a quarter of it. May
            change while running.
        commit_interval: how often the commit points are committed. May change while running.
        stop_timeout: how long a stop waits for what was taken in, running handlers included.
        revoke_timeout: how long a revocation waits for running handlers of the revoked partitions, and for its commit.
        stall_after: how long a message may be in a handler before the watchdog reports it.
        time_limit: how long a handler may take that states no limit of its own; None for ever.
        dead_letter_limit: when the consumer stops rather than give up one more message; None for never.
        fetch_size: messages taken from the client in one go, at most; 1,000,000 is the most it hands over.
        run_seconds: a worker's time slice with one lane.
        telemetry: where spans and metrics go; None for none.
        exactly_once: whether what handlers return and the offsets it is for are committed in Kafka transactions.
        transaction_interval: how often such a transaction is ended.
        config: librdkafka's keys as they are. Not part of `repr`: passwords are among them.
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
        """Check every option; raise `ConfigurationError` for the first that is wrong."""
        for option in (
            "workers",
            "max_concurrency",
            "lanes_per_worker",
            "max_in_flight",
            "max_in_flight_bytes",
            "fetch_size",
        ):
            check.positive_int(option, getattr(self, option))
        if self.fetch_size > _MOST_FETCHED:
            raise ConfigurationError(
                f"fetch_size is {self.fetch_size}, and the Kafka client hands over at most {_MOST_FETCHED} messages in "
                "one go; give that or less"
            )
        for option in ("commit_interval", "run_seconds", "stall_after"):
            check.positive(option, getattr(self, option))
        if self.time_limit is not None:
            check.positive("time_limit", self.time_limit)
        for option in ("stop_timeout", "revoke_timeout"):
            check.not_negative(option, getattr(self, option))
        if self.dead_letter_limit is not None and not isinstance(self.dead_letter_limit, DeadLetterLimit):
            raise ConfigurationError(
                f"dead_letter_limit must be a DeadLetterLimit, but is {self.dead_letter_limit!r}; "
                "give penstock.DeadLetterLimit(consecutive=...) or (ratio=...)"
            )
        check.a_telemetry(self.telemetry)
        check.a_boolean("exactly_once", self.exactly_once)
        check.positive("transaction_interval", self.transaction_interval)
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
        """Whether what is not committed is not read."""
        # The client does not mind its case.
        return str(self.config.get("isolation.level", "read_committed")).lower() == "read_committed"

    def client_config(self, group: str) -> dict[str, Any]:
        """Return the configuration of the Kafka consumer.

        Only committed messages are read, and a group without offsets starts at the earliest message, unless the
        user's config says otherwise.
        """
        defaults: dict[str, Any] = {**_DEFAULTS, "partition.assignment.strategy": _COOPERATIVE}
        if not check.is_classic(self.config):
            # The brokers decide both, and the client refuses them.
            del defaults["session.timeout.ms"], defaults["partition.assignment.strategy"]
        instance = check.instance_id(self.config)
        return {
            **defaults,
            **self.config,
            **({} if instance is None else {"group.instance.id": instance}),
            "group.id": group,
            "enable.auto.commit": False,
            "enable.auto.offset.store": False,
            # Decided here: see `Positions`.
            "auto.offset.reset": "error",
        }

    @property
    def offset_reset(self) -> int | None:
        """Where a partition begins of which the group has no offset, as a logical offset; None where it may not."""
        return _RESETS[str(self.config.get("auto.offset.reset", "earliest")).lower()]

    @property
    def topic_search_interval(self) -> float | None:
        """Seconds between two searches for topics that patterns match; None for none but at the start."""
        try:
            interval_ms = float(self.config[_SEARCH_EVERY_MS])
        except (KeyError, TypeError, ValueError):  # the client refuses what is no number
            return SEARCH_EVERY_S
        return max(_SEARCH_EVERY_LEAST_S, interval_ms / 1000) if interval_ms > 0 else None

    def producer_config(self) -> dict[str, Any]:
        """Return the configuration of the producer of results, dead letters and retries."""
        return {**_PRODUCER_DEFAULTS, **self.config, "enable.idempotence": True}


ConsumerSettings.__init__ = refusing_removed(ConsumerSettings.__init__)  # type: ignore[assignment] # a dataclass makes it

#: Of `message.max.bytes` the most that the client library lets a producer have: what could be read must not be refused
#: for its size. A topic's own limit counts for what a batch is when it is compressed: a message that came compressed
#: must fit again, and what fits in alone must not fail in company. Nothing times out: that brokers are away is no fault
#: of a message.
_PRODUCER_DEFAULTS = {
    "message.max.bytes": 1_000_000_000,
    "compression.type": "zstd",
    "batch.size": 65_536,
    "linger.ms": 5,
    "message.timeout.ms": 0,
}
