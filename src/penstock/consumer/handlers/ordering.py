"""Ordering: the identity of a message, which it shares with the messages that wait for it, and its lane."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass
from enum import Enum

from xxhash import xxh3_64_intdigest

from penstock import options as check
from penstock.errors import ConfigurationError, MessageFormatError, raised
from penstock.message import FetchedMessage, Message, Record, column
from penstock.routing import lane_of

#: Returns the key of a message: bytes, text, or None for no key.
KeyFunction = Callable[[Message], bytes | str | None]
#: The key that `key=` returned for a message, or its failure.
ComputedKey = bytes | MessageFormatError | None

#: The lane of all keyless messages under `Keyless.TOGETHER`.
_NO_KEY = b"__nokey"
#: 2**64 divided by the golden ratio.
_GOLDEN = 0x9E3779B97F4A7C15
#: Distance between the numbers of two partitions: a prime larger than the offsets that are in flight at once.
_PARTITION_STRIDE = 1_000_003


class Order(Enum):
    """Which messages are handled one at a time and in order."""

    #: Messages with the same key, whichever partitions and topics of the handler's key space they come from.
    KEY = "key"
    #: Messages of the same partition.
    PARTITION = "partition"
    #: No messages: each is independent.
    NONE = "none"


class Keyless(Enum):
    """How messages without a key are ordered under `Order.KEY`."""

    #: In the order of their partition, as in Kafka.
    PARTITION = "partition"
    #: All in one order.
    TOGETHER = "together"
    #: Each is independent.
    SPREAD = "spread"


def key_function(spec: str | KeyFunction | None) -> KeyFunction | None:
    """Return the key function for a user's option, or None if the record's own key counts.

    Raises `ConfigurationError` unless the option is "header:name" or a callable.
    """
    if spec is None:
        return None
    if isinstance(spec, str):
        name = spec.removeprefix("header:")
        if name == spec or not name:
            raise ConfigurationError(
                f"key must be 'header:name' or a function of the message, but is {spec!r}; leave it out to use "
                "the record's key"
            )
        return HeaderKey(name)
    check.a_callable("key", spec)
    return spec


@dataclass(frozen=True, slots=True)
class HeaderKey:
    """The key function of "header:name": the last header with that name is the key."""

    name: str

    def __call__(self, message: Message) -> bytes | None:
        """Return the key of a message."""
        return message.header(self.name)


@dataclass(slots=True, eq=False, repr=False)
class Ordering:
    """The order of one handler over a number of lanes.

    Immutable after its creation. The poll thread and the workers use it.
    """

    order: Order
    #: The order of messages without a key. For `Order.PARTITION` and `Order.NONE` that is every message.
    keyless: Keyless
    lanes: int
    key: KeyFunction | None = None
    _: KW_ONLY
    #: The number of the key space: equal keys of two spaces do not wait for each other.
    space: int = 0
    #: How many consecutive messages share a lane though they are independent: the batch size of the handler.
    together: int = 1

    def __post_init__(self) -> None:
        if self.order is not Order.KEY:
            self.keyless = Keyless.PARTITION if self.order is Order.PARTITION else Keyless.SPREAD

    @property
    def computes_keys(self) -> bool:
        """Whether `key=` replaces the records' own keys."""
        return self.key is not None and self.order is Order.KEY

    @property
    def calls_function(self) -> bool:
        """Whether `key=` is a function of the user, which may be slow."""
        return self.computes_keys and not isinstance(self.key, HeaderKey)

    def compute_keys(self, records: Iterable[Record]) -> list[ComputedKey]:
        """Return the key that `key=` returns for each record. Never raises."""
        function, found = self.key, list[ComputedKey]()
        if function is None:
            raise AssertionError("the records' own keys count: see `computes_keys`")
        for record in records:
            message = FetchedMessage()
            message._record = record  # noqa: SLF001 - see `FetchedMessage`
            try:
                key: object = function(message)
            except:  # noqa: E722 - see `raised`; an error of the user's code is the message's failure
                found.append(_key_failure(raised()))
                continue
            # First, for speed: most functions return bytes or None.
            found.append(key if isinstance(key, bytes) or key is None else _as_key(key))
        return found

    def lane_numbers(
        self, topic: str, partition: int, records: Sequence[Record], computed: Sequence[ComputedKey] | None = None
    ) -> list[int]:
        """Return the lane of each message of one partition. Never raises.

        `computed` are the keys that `compute_keys` returned, if it was called already.
        """
        lanes, space = self.lanes, self.space
        if self.order is not Order.KEY:
            if self.keyless is Keyless.PARTITION:
                return [self._partition_lane(topic, partition)] * len(records)
            return [self._place_lane(record) for record in records]
        keys: Sequence[ComputedKey]
        if self.key is None:
            keys = column(records, "key")
            if None not in keys:
                # `lane_of`, inlined: a call per message would cost as much as the hash.
                return [xxh3_64_intdigest(key, space) % lanes for key in keys]
        else:
            keys = self.compute_keys(records) if computed is None else computed
        return [
            xxh3_64_intdigest(key, space) % lanes if isinstance(key, bytes) else self._keyless_lane(record)
            for key, record in zip(keys, records, strict=True)
        ]

    def identity(self, record: Record) -> Hashable:
        """Return the identity of a message: equal identities wait for each other.

        Raises `MessageFormatError` if `key=` failed on the message or returned no valid key.
        """
        return self.identity_by(self.compute_keys((record,))[0] if self.computes_keys else record.key(), record)

    def identity_by(self, key: ComputedKey, record: Record) -> Hashable:
        """Do the same as `identity`, with a key that is already known."""
        if self.order is Order.KEY:
            if isinstance(key, MessageFormatError):
                raise key
            if key is not None or self.keyless is Keyless.TOGETHER:
                return self.space, key
        if self.keyless is Keyless.PARTITION:
            return (record.topic(), record.partition())
        return (record.topic(), record.partition(), record.offset())

    def _keyless_lane(self, record: Record) -> int:
        """Return the lane of a message without a key, or whose key function failed."""
        if self.keyless is Keyless.PARTITION:
            return self._partition_lane(record.topic(), record.partition())
        if self.keyless is Keyless.TOGETHER:
            return lane_of(_NO_KEY, self.lanes, self.space)
        return self._place_lane(record)

    def _place_lane(self, record: Record) -> int:
        """Return a lane by partition and offset. A redelivery gets the same lane, so it never runs twice at once."""
        # Partitions are read in parallel, so equal offsets of two partitions get different numbers. Fibonacci hashing
        # (Knuth, TAOCP 3, 6.4) sends neighbours to distant lanes.
        place = record.offset() // self.together + record.partition() * _PARTITION_STRIDE
        return (place * _GOLDEN >> 32) % self.lanes

    def _partition_lane(self, topic: str, partition: int) -> int:
        return lane_of(f"{topic}\0{partition}".encode(), self.lanes)


def _as_key(returned: object) -> ComputedKey:
    """Return the key of a function's return value that is neither bytes nor None."""
    if isinstance(returned, str):
        return returned.encode("utf-8", "surrogatepass")
    return MessageFormatError(
        f"the key function returned a {type(returned).__name__}; it must return bytes, text or None"
    )


def _key_failure(error: BaseException) -> MessageFormatError:
    """Return the failure of a message whose key function raised an error."""
    remedy = "; correct it"
    if isinstance(error, UnicodeDecodeError):
        remedy = ", as it does if a header's name is not UTF-8; correct the producer, or the function"
    failure = MessageFormatError(f"the key function failed with {type(error).__name__}{remedy}")
    # Without the frame of the caller, which refers to all messages of the fetch.
    stack = error.__traceback__
    failure.__cause__ = error.with_traceback(None if stack is None else stack.tb_next)
    return failure


def key_of(identity: object) -> object:
    """Return the key in an identity: bytes, or None for no key. An identity without a key is returned unchanged."""
    if isinstance(identity, tuple) and isinstance(identity[0], int):
        return identity[1]
    return identity
