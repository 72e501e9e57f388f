"""Which messages wait for each other: the identity of a message under an order mode, and its lane."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from enum import Enum

from xxhash import xxh3_64_intdigest

from penstock import options as check
from penstock.errors import ConfigurationError, MessageFormatError
from penstock.message import Message, Record, column
from penstock.routing import lane_of

#: What stands for a message's key: bytes, text, or None where it has none.
KeyFunction = Callable[[Message], bytes | str | None]

#: The lane of all keyless messages under `Keyless.TOGETHER`.
_NO_KEY = b"__nokey"
#: 2**64 divided by the golden ratio.
_GOLDEN = 0x9E3779B97F4A7C15
#: How far the places of two partitions lie apart: a prime that no handler gets ahead by.
_PARTITIONS_APART = 1_000_003


class Order(Enum):
    """Which messages are handled one at a time and in order."""

    #: Messages with the same key, whichever partitions and topics of the handler's key space they come from.
    KEY = "key"
    #: Messages of the same partition.
    PARTITION = "partition"
    #: None; every message stands for itself.
    NONE = "none"


class Keyless(Enum):
    """How messages without a key are ordered under `Order.KEY`."""

    #: In the order of their partition, as Kafka has it.
    PARTITION = "partition"
    #: All in one order.
    TOGETHER = "together"
    #: Each stands for itself.
    SPREAD = "spread"


def key_function(given: str | KeyFunction | None) -> KeyFunction | None:
    """Return the function that gives a message its key, or None where the record's own is meant.

    Raises `ConfigurationError` for what is neither "header:name" nor a callable.
    """
    if given is None:
        return None
    if isinstance(given, str):
        name = given.removeprefix("header:")
        if name == given or not name:
            raise ConfigurationError(
                f"key must be 'header:name' or a function of the message, but is {given!r}; leave it out to use "
                "the record's key"
            )
        return HeaderKey(name)
    check.a_callable("key", given)
    return given


class HeaderKey:
    """Gives a message the last of its headers with a name as its key. It never waits, unlike a user's function."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, message: Message) -> bytes | None:
        """Return the key of a message."""
        return message.header(self.name)


class Ordering:
    """The order of one handler over a number of lanes.

    Used by the poll thread and by workers; it has no state that changes. `space` is the number of the key space: equal
    keys of two spaces do not wait for each other. `together` is how many messages in a row share a lane though nothing
    orders them, for handlers that take batches.
    """

    def __init__(
        self,
        order: Order,
        keyless: Keyless,
        lanes: int,
        key: KeyFunction | None = None,
        *,
        space: int = 0,
        together: int = 1,
    ) -> None:
        self._order = order
        self._keyless = keyless
        self._lanes = lanes
        self._key = key
        self._space = space
        self._together = together

    @property
    def has_key_function(self) -> bool:
        """Whether lanes cannot be chosen without calling a function of the user's, which may take its time."""
        return calls_key_function(self._order, self._key)

    def keyed(self, record: Record) -> tuple[int, Hashable]:
        """Return the lane of a message and its identity, with one call of the key function. Raises as `identity`."""
        identity = self.identity(record)
        key = key_of(identity)
        if isinstance(key, bytes):
            return lane_of(key, self._lanes, self._space), identity
        return self.keyless_lane(record), identity

    def lane_numbers(
        self, topic: str, partition: int, records: Sequence[Record], unkeyed: list[Record] | None = None
    ) -> list[int]:
        """Return the lane of each message of one partition, and add to `unkeyed` those whose key cannot be had.

        Never raises.
        """
        lanes, space = self._lanes, self._space
        if self._order is Order.KEY:
            if self._key is None:
                keys: list[bytes | None] = column(records, "key")
            else:
                keys = [self._routed_key(self._key, record, unkeyed) for record in records]
            if None not in keys:
                # `lane_of`, written out: a call for each message would cost as much as the hash.
                return [xxh3_64_intdigest(key, space) % lanes for key in keys]  # type: ignore[arg-type] # no None in it
            return [
                self.keyless_lane(record) if key is None else lane_of(key, lanes, space)
                for key, record in zip(keys, records, strict=True)
            ]
        if self._order is Order.PARTITION:
            return [self._partition_lane(topic, partition)] * len(records)
        return [self._place_lane(record) for record in records]

    def identity(self, record: Record) -> Hashable:
        """Return what the messages that wait for this one have in common with it.

        Raises `MessageFormatError` where the user's key function failed on it, or gave something that is no key.
        """
        if self._order is Order.KEY:
            key = record.key() if self._key is None else self._own_key(self._key, record)
            if key is not None or self._keyless is Keyless.TOGETHER:
                return self._space, key
            if self._keyless is Keyless.PARTITION:
                return (record.topic(), record.partition())
        elif self._order is Order.PARTITION:
            return (record.topic(), record.partition())
        return (record.topic(), record.partition(), record.offset())

    def _own_key(self, function: KeyFunction, record: Record) -> bytes | None:
        try:
            key = function(Message(record))
        except UnicodeDecodeError as error:
            raise MessageFormatError(
                "the key function failed with UnicodeDecodeError, as it does where a header's name is not UTF-8; mend "
                "the producer, or the function"
            ) from error
        except BaseException as error:
            raise MessageFormatError(f"the key function failed with {type(error).__name__}; mend it") from error
        if key is None or isinstance(key, bytes):
            return key
        if isinstance(key, str):
            return key.encode("utf-8", "surrogatepass")
        raise MessageFormatError(
            f"the key function returned a {type(key).__name__}; it must return bytes, text or None"
        )

    def _routed_key(self, function: KeyFunction, record: Record, unkeyed: list[Record] | None) -> bytes | None:
        """Return a key to choose a lane by; the failure of the user's function shows when the message is handled."""
        try:
            return self._own_key(function, record)
        except MessageFormatError:
            if unkeyed is not None:
                unkeyed.append(record)
            return None

    def keyless_lane(self, record: Record) -> int:
        """Return the lane of a message without a key, or whose key cannot be had."""
        if self._keyless is Keyless.PARTITION:
            return self._partition_lane(record.topic(), record.partition())
        if self._keyless is Keyless.TOGETHER:
            return lane_of(_NO_KEY, self._lanes, self._space)
        return self._place_lane(record)

    def _place_lane(self, record: Record) -> int:
        """Return a lane by a message's place: the same each time it comes, so that it never runs beside itself."""
        # Partitions are read side by side: the same offset of two of them is another place. Fibonacci hashing (Knuth,
        # TAOCP 3, 6.4): neighbours lie far apart.
        place = record.offset() // self._together + record.partition() * _PARTITIONS_APART
        return (place * _GOLDEN >> 32) % self._lanes

    def _partition_lane(self, topic: str, partition: int) -> int:
        return lane_of(f"{topic}\0{partition}".encode(), self._lanes)


def calls_key_function(order: Order, key: KeyFunction | None) -> bool:
    """Tell whether a lane is chosen by a function of the user's, which may take its time."""
    return key is not None and order is Order.KEY and not isinstance(key, HeaderKey)


def key_of(identity: object) -> object:
    """Return the key of an identity that `Ordering` made: bytes, or None for no key; any other identity as it is."""
    if isinstance(identity, tuple) and isinstance(identity[0], int):
        return identity[1]
    return identity
