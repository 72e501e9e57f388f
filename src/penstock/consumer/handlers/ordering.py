"""Which messages wait for each other: the identity of a message under an order mode, and its lane."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass
from enum import Enum

from xxhash import xxh3_64_intdigest

from penstock import options as check
from penstock.errors import ConfigurationError, MessageFormatError
from penstock.message import FetchedMessage, Message, Record, column
from penstock.routing import lane_of

#: What stands for a message's key: bytes, text, or None where it has none.
KeyFunction = Callable[[Message], bytes | str | None]
#: The same as `key=` gave it, or why it cannot be had.
GivenKey = bytes | MessageFormatError | None

#: The lane of all keyless messages under `Keyless.TOGETHER`.
_NO_KEY = b"__nokey"
#: 2**64 divided by the golden ratio.
_GOLDEN = 0x9E3779B97F4A7C15
#: How far the places of two partitions differ: a prime that no handler gets ahead by.
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


@dataclass(frozen=True, slots=True)
class HeaderKey:
    """Gives a message the last of its headers with a name as its key."""

    name: str

    def __call__(self, message: Message) -> bytes | None:
        """Return the key of a message."""
        return message.header(self.name)


@dataclass(slots=True, eq=False, repr=False)
class Ordering:
    """The order of one handler over a number of lanes.

    Used by the poll thread and by workers; it has no state that changes.
    """

    order: Order
    #: How messages that no key orders are ordered: those without a key, or, by the order, all.
    keyless: Keyless
    lanes: int
    key: KeyFunction | None = None
    _: KW_ONLY
    #: The number of the key space: equal keys of two spaces do not wait for each other.
    space: int = 0
    #: How many messages in a row share a lane though nothing orders them, for handlers that take batches.
    together: int = 1

    def __post_init__(self) -> None:
        if self.order is not Order.KEY:
            self.keyless = Keyless.PARTITION if self.order is Order.PARTITION else Keyless.SPREAD

    @property
    def has_given_keys(self) -> bool:
        """Whether `key=` says what stands for the records' keys."""
        return self.key is not None and self.order is Order.KEY

    @property
    def calls_function(self) -> bool:
        """Whether that is a function of the user's, which may take its time."""
        return self.has_given_keys and not isinstance(self.key, HeaderKey)

    def given_keys(self, records: Iterable[Record]) -> list[GivenKey]:
        """Return what `key=` gives for each of these. Never raises."""
        function, found = self.key, list[GivenKey]()
        if function is None:
            raise AssertionError("the records' own keys count: see `has_given_keys`")
        for record in records:
            message = FetchedMessage()
            message._record = record  # noqa: SLF001 - see there
            try:
                key: object = function(message)
            except BaseException as error:  # noqa: BLE001 - the user's code: it is this message's failure
                found.append(_key_failure(error))
                continue
            # First, for speed: what most functions return.
            found.append(key if isinstance(key, bytes) or key is None else _as_key(key))
        return found

    def lane_numbers(
        self, topic: str, partition: int, records: Sequence[Record], given: Sequence[GivenKey] | None = None
    ) -> list[int]:
        """Return the lane of each message of one partition. Never raises.

        `given` are their keys by `given_keys`, where those were asked for before.
        """
        lanes, space = self.lanes, self.space
        if self.order is not Order.KEY:
            if self.keyless is Keyless.PARTITION:
                return [self._partition_lane(topic, partition)] * len(records)
            return [self._place_lane(record) for record in records]
        keys: Sequence[GivenKey]
        if self.key is None:
            keys = column(records, "key")
            if None not in keys:
                # `lane_of`, written out: a call for each message would cost as much as the hash.
                return [xxh3_64_intdigest(key, space) % lanes for key in keys]
        else:
            keys = self.given_keys(records) if given is None else given
        return [
            xxh3_64_intdigest(key, space) % lanes if isinstance(key, bytes) else self._keyless_lane(record)
            for key, record in zip(keys, records, strict=True)
        ]

    def identity(self, record: Record) -> Hashable:
        """Return what the messages that wait for this one have in common with it.

        Raises `MessageFormatError` where `key=` failed on it, or gave something that is no key.
        """
        return self.identity_by(self.given_keys((record,))[0] if self.has_given_keys else record.key(), record)

    def identity_by(self, key: GivenKey, record: Record) -> Hashable:
        """Do as `identity`, with the key of a message as it is known."""
        if self.order is Order.KEY:
            if isinstance(key, MessageFormatError):
                raise key
            if key is not None or self.keyless is Keyless.TOGETHER:
                return self.space, key
        if self.keyless is Keyless.PARTITION:
            return (record.topic(), record.partition())
        return (record.topic(), record.partition(), record.offset())

    def _keyless_lane(self, record: Record) -> int:
        """Return the lane of a message that no key orders, or whose key cannot be had."""
        if self.keyless is Keyless.PARTITION:
            return self._partition_lane(record.topic(), record.partition())
        if self.keyless is Keyless.TOGETHER:
            return lane_of(_NO_KEY, self.lanes, self.space)
        return self._place_lane(record)

    def _place_lane(self, record: Record) -> int:
        """Return a lane by a message's place: the same each time it comes, so that it never runs twice at once."""
        # Partitions are read side by side: the same offset of two of them is another place. Fibonacci hashing (Knuth,
        # TAOCP 3, 6.4): neighbours get distant lanes.
        place = record.offset() // self.together + record.partition() * _PARTITIONS_APART
        return (place * _GOLDEN >> 32) % self.lanes

    def _partition_lane(self, topic: str, partition: int) -> int:
        return lane_of(f"{topic}\0{partition}".encode(), self.lanes)


def _as_key(given: object) -> GivenKey:
    """Return as a key what a function gave that is not bytes or None."""
    if isinstance(given, str):
        return given.encode("utf-8", "surrogatepass")
    return MessageFormatError(f"the key function returned a {type(given).__name__}; it must return bytes, text or None")


def _key_failure(error: BaseException) -> MessageFormatError:
    """Return why a message has no key, given what the function for it raised."""
    remedy = "; correct it"
    if isinstance(error, UnicodeDecodeError):
        remedy = ", as it does where a header's name is not UTF-8; correct the producer, or the function"
    failure = MessageFormatError(f"the key function failed with {type(error).__name__}{remedy}")
    # Without the frame of the caller, which has all messages of the fetch.
    stack = error.__traceback__
    failure.__cause__ = error.with_traceback(None if stack is None else stack.tb_next)
    return failure


def key_of(identity: object) -> object:
    """Return the key of an identity that `Ordering` made: bytes, or None for no key; any other identity as it is."""
    if isinstance(identity, tuple) and isinstance(identity[0], int):
        return identity[1]
    return identity
