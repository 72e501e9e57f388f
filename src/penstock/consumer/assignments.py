"""Assignments: one object for each incarnation of a partition in this process; and the sizes of messages.

State hangs on the object, never on the partition's number. After a partition went and came back, completions and
retries of its former incarnation reach an old object, which is never committed.

Sizes are in bytes, as the limits count them: key, value, headers and the objects around them. The client offers only
the length of a value. A key costs one call per message. Headers cost as much as the whole rest of the routing, because
they become Python objects. So for many messages a sample is measured, until a partition has a message with a large key
or large headers. From then on each message of that partition is measured.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass, field
from enum import StrEnum

from penstock.consumer.handlers.ordering import ComputedKey
from penstock.consumer.handlers.route import Route
from penstock.errors import MessageFormatError
from penstock.message import Record, headers_of
from penstock.offsets import Block, CommitPoint, OffsetMap, Tracker
from penstock.routing import Lane, ParkedKey, Run, RunsAside


class PauseReason(StrEnum):
    """Why a partition is paused. Statistics and explanations show the value."""

    APP = "by the app"
    IN_FLIGHT = "in-flight limit"
    BYTES = "byte limit"
    PARKED = "parked limit"
    OFFSET_MAP = "offset map limit"
    STOPPING = "stopping"


@dataclass(frozen=True, slots=True)
class AppPause:
    """The pause of a partition by the app itself."""

    #: In seconds since the epoch.
    since: float
    #: The call that ends it: for this partition, or for its topic if the whole topic is paused.
    ended_by: str


@dataclass(slots=True, eq=False, repr=False)
class Assignment:
    """One incarnation of a partition.

    If the group has no offset, or it was not fetched, the start of reading is unknown until the first message comes or
    the client has a position. Until then the tracker counts from 0, which is no offset to commit or to count lag from.

    The poll thread writes all fields. Workers read `active` and `route`, and complete on `tracker`, which is
    thread-safe. `active` becomes False once and never True again.
    """

    topic: str
    partition: int
    route: Route
    _: KW_ONLY
    #: The offset at which reading starts, or None if it is unknown. Never written again.
    start: int | None
    restored: InitVar[OffsetMap | None] = None
    #: The owner in committed offset maps: group, topic and partition.
    owner: bytes = b""
    tracker: Tracker = field(init=False)
    #: False once revoked or lost. Then its messages are not handed out, completed or committed.
    active: bool = field(default=True, init=False)
    #: The commit point that was sent last, and whether the group is known to have it.
    committed: CommitPoint = field(init=False)
    acknowledged: bool = field(default=True, init=False)
    #: Why the partition is paused, or None.
    paused: PauseReason | None = field(default=None, init=False)
    #: The time since when it has been at its limit, or None.
    full_since: float | None = field(default=None, init=False)
    #: The position up to which its offset map has room, and the time to measure that again.
    map_end: int = field(default=0, init=False)
    map_look: float = field(default=0.0, init=False)
    #: Whether the client seeks a logical offset. Its own position means nothing before the first message.
    is_sought: bool = field(default=False, init=False)
    #: Whether a message with a large key or large headers was seen. From then on each message is measured.
    sizes_each: bool = field(default=False, init=False)
    #: Whether it was removed: lost, or revoked and committed as far as possible.
    is_gone: bool = field(default=False, init=False)
    #: The end of the partition's log as last reported by the client, or None.
    end: int | None = field(default=None, init=False)

    def __post_init__(self, restored: OffsetMap | None) -> None:
        self.tracker = Tracker(self.start or 0, restored, self.owner)
        self.committed = self.tracker.commit_point()

    @property
    def source(self) -> str:
        """The topic that its messages first came from: for a retry topic, the topic whose messages wait there."""
        return self.route.source or self.topic

    @property
    def known(self) -> bool:
        """Whether the position of the partition is known. Once True, it stays True."""
        return self.start is not None or self.tracker.position > 0

    def lag(self, watermark: int) -> int | None:
        """Return the offsets from the watermark to the end of the log, or None while one of them is unknown."""
        # The client learns the end of the log from fetches, and a partition paused by the app has none.
        if self.end is None or self.paused is PauseReason.APP:
            return None
        # An end of 0 means a log that never had a record. The client has no position in it, and the lag is 0.
        if not self.known and self.end > 0:
            return None
        return max(0, self.end - watermark)

    def __repr__(self) -> str:
        return f"{self.topic}:{self.partition}"


@dataclass(slots=True, eq=False, repr=False)
class Fetch:
    """The messages of one fetch of one assignment: the owner of its runs.

    Immutable once its messages are on their lanes.
    """

    assignment: Assignment
    block: Block
    arrived: float
    #: The keys that `key=` returned for its messages, by index in the block; None without `key=`. Computed once.
    keys: Sequence[ComputedKey] | None = field(default=None, init=False)
    #: Whether the key function failed for some of its messages. These fail when they are handled.
    has_unkeyed: bool = field(default=False, init=False)

    def ask_keys(self, records: Iterable[Record]) -> None:
        """Call `key=` for all its messages, if the handler has that option. Before they are put on lanes."""
        route = self.assignment.route
        if route.ordering.computes_keys:
            # Tested here, for speed: nearly all records are seen as they were fetched.
            self.keys = route.ordering.compute_keys(records if route.source is None else map(route.as_seen, records))
            self.has_unkeyed = MessageFormatError in set(map(type, self.keys))


ConsumerRun = Run[Fetch, Record]
ConsumerLane = Lane[Fetch, Record]
ConsumerParked = ParkedKey[Fetch, Record]
ConsumerAside = RunsAside[Fetch, Record]
#: A message in flight: its fetch, its index in the block, and the record.
Item = tuple[Fetch, int, Record]


def require_key(item: Item) -> Hashable:
    """Return the identity of a message: equal ones wait for each other. Raise the failure of its key function."""
    fetch, index, record = item
    keys = fetch.keys
    return fetch.assignment.route.ordering.identity_by(record.key() if keys is None else keys[index], record)


class Assignments:
    """The current assignments of this process. The poll thread changes them; any thread may read a copy."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._current: dict[tuple[str, int], Assignment] = {}

    def get(self, topic: str, partition: int) -> Assignment | None:
        """Return the current incarnation of a partition, or None. On the poll thread only."""
        return self._current.get((topic, partition))

    def put(self, assignment: Assignment) -> None:
        """Add a new incarnation. A former one of the same partition becomes inactive."""
        with self._lock:
            former = self._current.get((assignment.topic, assignment.partition))
            if former is not None:
                former.active, former.is_gone = False, True
            self._current[assignment.topic, assignment.partition] = assignment

    def deactivate(self, partitions: Iterable[tuple[str, int]]) -> list[Assignment]:
        """Stop handing out messages of these partitions; return their assignments, which stay in the table."""
        found = [self._current[place] for place in partitions if place in self._current]
        for assignment in found:
            assignment.active = False
        return found

    def remove(self, assignments: Iterable[Assignment]) -> None:
        """Remove these assignments."""
        with self._lock:
            for assignment in assignments:
                assignment.is_gone = True
                self._current.pop((assignment.topic, assignment.partition), None)

    def all(self) -> list[Assignment]:
        """Return the current assignments."""
        with self._lock:
            return list(self._current.values())


#: Bytes of a message besides its key, value and headers: the objects of the client and of Python.
OVERHEAD_BYTES = 300
#: Bytes of a header besides its name and content.
_HEADER_BYTES = 150
#: In a fetch of more than `_MANY` messages, each 31st is measured. A prime, so that the sample has messages of all
#: senders if several senders alternate.
_SAMPLED = 31
_MANY = 2 * _SAMPLED
#: After a message with so many bytes of key and headers, each message of its partition is measured.
_LARGE_BYTES = 1024


def size_in_bytes(record: Record) -> int:
    """Return the approximate bytes of a message."""
    return OVERHEAD_BYTES + len(record) + _unsized_bytes(record)


def total_size_in_bytes(records: Sequence[Record], assignment: Assignment) -> int:
    """Return the approximate bytes of messages of one partition. On the poll thread only."""
    sample = records if assignment.sizes_each or len(records) <= _MANY else records[::_SAMPLED]
    sizes = [_unsized_bytes(record) for record in sample]
    if not assignment.sizes_each and max(sizes) >= _LARGE_BYTES:
        assignment.sizes_each = True
        sizes = [_unsized_bytes(record) for record in records]
    return OVERHEAD_BYTES * len(records) + sum(map(len, records)) + sum(sizes) * len(records) // len(sizes)


def _unsized_bytes(record: Record) -> int:
    """Return the bytes of a message's key and headers, which its `len` leaves out."""
    try:
        headers = headers_of(record) or ()
    except UnicodeDecodeError:
        headers = ()  # the client cannot read them
    sizes = [_HEADER_BYTES + len(name) + len(content or b"") for name, content in headers]
    return len(record.key() or b"") + sum(sizes)
