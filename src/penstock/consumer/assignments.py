"""Assignments: one object for each incarnation of a partition in this process; and the sizes of messages.

State hangs on the object, never on the partition's number: when a partition goes and comes back, completions and
retries of the former incarnation find an object that nobody commits any more.

Sizes are in bytes, as the limits count them: key, value and headers, and the objects around them. The client has the
length of a value alone. A key costs a call a message; headers cost as much as all the rest of the routing, for they are
made Python objects. So of many messages at once some are a sample for the others, as long as none of a partition had a
key or headers of a size that matters; from then on each is measured.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import KW_ONLY, InitVar, dataclass, field
from enum import StrEnum

from penstock.consumer.handlers.ordering import GivenKey
from penstock.consumer.handlers.route import Route
from penstock.errors import MessageFormatError
from penstock.message import Record, headers_of
from penstock.offsets import Block, CommitPoint, OffsetMap, Tracker
from penstock.routing import Lane, ParkedKey, Run, RunsAside


class PauseReason(StrEnum):
    """Why a partition is paused; the value is what statistics and explanations show."""

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
    #: The call that ends it, for this partition alone where it alone is paused.
    ended_by: str


@dataclass(slots=True, eq=False, repr=False)
class Assignment:
    """One incarnation of a partition.

    Where the group has no offset, or none was fetched, nobody knows where reading starts until the first message comes,
    or the client has a position. Until then the tracker counts from 0, which is nothing to commit or to count lag from.

    The poll thread writes all fields; workers read `active` and `route` and complete on `tracker`, which is
    thread-safe. `active` falls once and never rises again.
    """

    topic: str
    partition: int
    route: Route
    _: KW_ONLY
    #: The offset at which reading starts, or None where it is not known. Never written again.
    start: int | None
    restored: InitVar[OffsetMap | None] = None
    #: Whose offset maps are committed: group, topic and partition.
    owner: bytes = b""
    tracker: Tracker = field(init=False)
    #: False once revoked or lost: nothing more of it is handed out, completed or committed.
    active: bool = field(default=True, init=False)
    #: What was sent to be committed last, and whether the group is known to have it.
    committed: CommitPoint = field(init=False)
    acknowledged: bool = field(default=True, init=False)
    #: Why the partition is paused, or None.
    paused: PauseReason | None = field(default=None, init=False)
    #: Since when it has been at its limit, or None.
    full_since: float | None = field(default=None, init=False)
    #: Up to which position its offset map has room, and when that is to be measured again.
    map_end: int = field(default=0, init=False)
    map_look: float = field(default=0.0, init=False)
    #: Whether the client seeks a logical offset; its own position means nothing before the first message.
    is_sought: bool = field(default=False, init=False)
    #: Whether a message with a large key or large headers was seen: from then on each is measured with its own.
    sizes_each: bool = field(default=False, init=False)
    #: Whether it is forgotten: revoked, with all that could be committed of it, or lost.
    is_gone: bool = field(default=False, init=False)
    #: The end of the partition's log as the client last heard of it, or None.
    end: int | None = field(default=None, init=False)

    def __post_init__(self, restored: OffsetMap | None) -> None:
        self.tracker = Tracker(self.start or 0, restored, self.owner)
        self.committed = self.tracker.commit_point()

    @property
    def known(self) -> bool:
        """Whether it is known where the partition stands. Once it is, it stays so."""
        return self.start is not None or self.tracker.position > 0

    def lag(self, watermark: int) -> int | None:
        """Return the offsets from the watermark to the end of the log, or None while one of them is not known."""
        # What the client knows of the end comes with fetches, and those have ended where the app has paused it.
        if self.end is None or self.paused is PauseReason.APP:
            return None
        # The client has no position in a log that never had a record, and there is nothing to read in it.
        if not self.known and self.end > 0:
            return None
        return max(0, self.end - watermark)

    def __repr__(self) -> str:
        return f"{self.topic}:{self.partition}"


@dataclass(slots=True, eq=False, repr=False)
class Fetch:
    """What one fetch brought of one assignment, and when: the owner of its runs.

    Immutable once its messages are on their lanes.
    """

    assignment: Assignment
    block: Block
    arrived: float
    #: What stands for the keys of its messages, by their places in the block, where `key=` says so: asked for once.
    keys: Sequence[GivenKey] | None = field(default=None, init=False)
    #: Whether a key could not be had of some of its messages: they fail when they are handled.
    has_unkeyed: bool = field(default=False, init=False)

    def ask_keys(self, records: Iterable[Record]) -> None:
        """Ask what stands for the keys of all its messages, where `key=` says so. Before they are put on lanes."""
        ordering = self.assignment.route.ordering
        if ordering.has_given_keys:
            self.keys = ordering.given_keys(records)
            self.has_unkeyed = MessageFormatError in set(map(type, self.keys))


ConsumerRun = Run[Fetch, Record]
ConsumerLane = Lane[Fetch, Record]
ConsumerParked = ParkedKey[Fetch, Record]
ConsumerAside = RunsAside[Fetch, Record]
#: A message in flight: what it belongs to, its place in the block, and the record.
Item = tuple[Fetch, int, Record]


def require_key(item: Item) -> Hashable:
    """Return what a message has in common with those that wait for it; raise what `key=` raised for the message."""
    fetch, index, record = item
    keys = fetch.keys
    return fetch.assignment.route.ordering.identity_by(record.key() if keys is None else keys[index], record)


class Assignments:
    """The partitions this process has now. The poll thread changes it, any thread may read a copy."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._current: dict[tuple[str, int], Assignment] = {}

    def get(self, topic: str, partition: int) -> Assignment | None:
        """Return the present incarnation of a partition, or None. On the poll thread only."""
        return self._current.get((topic, partition))

    def put(self, assignment: Assignment) -> None:
        """Take a new incarnation in; a former one of the same partition becomes inactive."""
        with self._lock:
            former = self._current.get((assignment.topic, assignment.partition))
            if former is not None:
                former.active, former.is_gone = False, True
            self._current[assignment.topic, assignment.partition] = assignment

    def deactivate(self, partitions: Iterable[tuple[str, int]]) -> list[Assignment]:
        """Stop handing out messages of these partitions and return their assignments, which stay in the table."""
        found = [self._current[place] for place in partitions if place in self._current]
        for assignment in found:
            assignment.active = False
        return found

    def remove(self, assignments: Iterable[Assignment]) -> None:
        """Forget these assignments."""
        with self._lock:
            for assignment in assignments:
                assignment.is_gone = True
                self._current.pop((assignment.topic, assignment.partition), None)

    def all(self) -> list[Assignment]:
        """Return the present assignments."""
        with self._lock:
            return list(self._current.values())


#: Bytes that a message takes besides its key, value and headers: the objects of the client and of Python.
OVERHEAD_BYTES = 300
#: Bytes that a header takes besides its name and content.
_HEADER_BYTES = 150
#: One of so many messages is the sample, the first among them, in a fetch of more than twice as many. A prime: where
#: several senders alternate, all are seen.
_SAMPLED = 31
_MANY = 2 * _SAMPLED
#: Bytes of key and headers of one message from which on each of its partition is measured.
_LARGE_BYTES = 1024


def size_in_bytes(record: Record) -> int:
    """Return the bytes that a message takes, about."""
    return OVERHEAD_BYTES + len(record) + _unsized_bytes(record)


def total_size_in_bytes(records: Sequence[Record], assignment: Assignment) -> int:
    """Return the bytes that messages of one partition take, about. On the poll thread only."""
    sample = records if assignment.sizes_each or len(records) <= _MANY else records[::_SAMPLED]
    sizes = [_unsized_bytes(record) for record in sample]
    if not assignment.sizes_each and max(sizes) >= _LARGE_BYTES:
        assignment.sizes_each = True
        sizes = [_unsized_bytes(record) for record in records]
    return OVERHEAD_BYTES * len(records) + sum(map(len, records)) + sum(sizes) * len(records) // len(sizes)


def _unsized_bytes(record: Record) -> int:
    """Return the bytes of what a message's own length leaves out."""
    try:
        headers = headers_of(record) or ()
    except UnicodeDecodeError:
        headers = ()  # the client cannot read them at all
    sizes = [_HEADER_BYTES + len(name) + len(content or b"") for name, content in headers]
    return len(record.key() or b"") + sum(sizes)
