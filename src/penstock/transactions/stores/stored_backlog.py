"""A shard of a store outside Kafka, as a backlog of the engine, and its done log: what was published, as Kafka has it.

The store has the messages, and judges what is decided and due. What it gives is in the queue, which all stores have,
until it is settled; what is set aside leaves its messages in the store. What is to be noted there is noted by `flush`,
in its order: where the store fails for a moment, nothing is lost but time, and nothing is taken from it before.

A record of the done log holds the ids of what one Kafka transaction published, and is part of it. Each shard of a store
has a partition of its own. What the store has marked as published is forgotten, so the log stays short.
"""

from __future__ import annotations

import logging
import struct
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from confluent_kafka import KafkaError, KafkaException, Message, TopicPartition

from penstock import clients
from penstock.clients.kafka_errors import ErrorKind, is_missing_right
from penstock.clients.reading import PartitionReader, Place
from penstock.clients.rights import Operation, principal_of, topic_right
from penstock.clients.topics import TopicSpec, ensure_topics
from penstock.clients.transactional.missing_rights import MissingRights
from penstock.errors import MessageFormatError
from penstock.options import ClientConfig
from penstock.transactions.core.commit_batch import DecidedBatch
from penstock.transactions.core.pending import Pending
from penstock.transactions.core.quarantine import TargetQuarantine
from penstock.transactions.core.queue import Blocking, Delays, ReadyQueue
from penstock.transactions.publishing.flight import Backlog
from penstock.transactions.stores.shards import ShardBacklog
from penstock.transactions.wire.half import Half
from penstock.transactions.wire.ids import ID_BYTES, id_bytes, id_text
from penstock.transactions.wire.ops import Author, Verdict
from penstock.transactions.wire.topics import KEPT

_log = logging.getLogger("penstock.transactions")

#: Seconds in which the broker shall have said where the log begins and ends, and have given it all.
_ANSWER_S = 5.0
_READ_S = 15.0
_HEAD = struct.Struct(">BI")
_VERSION = 1


class DoneRead(NamedTuple):
    """What a done log said: where it ended, and the ids in it."""

    end: int
    ids: frozenset[str]


class DoneLog:
    """One partition of a done log, the shard's own. Reading is thread-safe; one thread forgets.

    What right is missing is noted in `rights`; without them in the program's log alone.
    """

    def __init__(
        self,
        bootstrap_servers: str,
        config: ClientConfig,
        topic: str,
        partition: int,
        rights: MissingRights | None = None,
    ) -> None:
        self._rights = MissingRights(config) if rights is None else rights
        self.topic = topic
        self.partition = partition
        self._reader = partial(PartitionReader, bootstrap_servers, config, topic, _raise_forbidden)
        #: Asks brokers of this log, and of what was published with it.
        self.admin = clients.admin(bootstrap_servers, config)
        self._forgotten_to = 0

    def read(self) -> DoneRead:
        """Return the end of the log and the ids in it. Whose records are looked for must have been shut out.

        Raises `KafkaException` where a broker does not answer, and `TimeoutError` where the end was not reached in
        time.
        """
        place = self.topic, self.partition
        low, end = self.bounds()
        found: set[str] = set()
        with self._reader(isolation="read_committed") as reader:
            for records in reader.read({place: low}, {place: end}, limit_s=_READ_S):
                for message in records:
                    found.update(_ids(message))
        return DoneRead(end, frozenset(found))

    def bounds(self, limit_s: float = _ANSWER_S) -> tuple[int, int]:
        """Return where the log begins and ends. Raises `KafkaException` where a broker does not answer in time."""
        with self._reader(isolation="read_uncommitted") as reader:
            return reader.bounds(self.topic, [self.partition], limit_s)[self.partition]

    def forget(self, offset: int) -> None:
        """Delete what stands below an offset. Does not wait; what fails is deleted by a later call."""
        if offset <= self._forgotten_to:
            return
        self._forgotten_to = offset
        places = [TopicPartition(self.topic, self.partition, offset)]
        for future in self.admin.delete_records(places, request_timeout=_ANSWER_S).values():
            future.add_done_callback(self._take_deletion)

    def _take_deletion(self, future: Any) -> None:
        """Take in how a deletion ended, in a thread of the client's."""
        error, right = future.exception(), topic_right(Operation.DELETE, self.topic)
        if error is None:
            self._rights.granted(right)
        elif isinstance(error, KafkaException) and is_missing_right(error):
            self._rights.refused(f"topic {self.topic} cannot be truncated, so that it grows", right)
        else:
            _log.warning("%s:%d could not be truncated: %s; it is tried again", self.topic, self.partition, error)


def create_done_log(bootstrap_servers: str, config: ClientConfig, topic: str, partitions: int) -> int:
    """Create a done log where it is absent, and return its number of partitions. Raises as `ensure_topics`."""
    admin = clients.admin(bootstrap_servers, config)
    needs = {topic: (Operation.READ, Operation.WRITE, Operation.DELETE)}
    specs, principal = [TopicSpec(topic, partitions, KEPT)], principal_of(config)
    return ensure_topics(admin, bootstrap_servers, specs, needs=needs, principal=principal, of_store=True)[topic]


def encode_ids(ids: Sequence[str]) -> bytes:
    """Return the value of a record: version, count, ids of 16 bytes; integers are big-endian."""
    return b"".join((_HEAD.pack(_VERSION, len(ids)), *map(id_bytes, ids)))


def decode_ids(value: bytes | None) -> list[str]:
    """Read the value of a record. Raises `MessageFormatError`."""
    content = value or b""
    if len(content) < _HEAD.size:
        raise MessageFormatError(f"a record of a done log with {len(content)} bytes; it is ignored")
    version, count = _HEAD.unpack_from(content)
    if version != _VERSION or len(content) != _HEAD.size + count * ID_BYTES:
        raise MessageFormatError(
            f"a record of a done log of version {version}, with {count} ids in {len(content)} bytes; it is ignored"
        )
    return [id_text(content[start : start + ID_BYTES]) for start in range(_HEAD.size, len(content), ID_BYTES)]


def _raise_forbidden(kind: ErrorKind, error: KafkaError, _place: Place) -> None:
    """Raise where the log may not be read; all else the client mends by itself, or the time limit tells."""
    if kind is ErrorKind.MISSING_RIGHT:
        raise KafkaException(error)


def _ids(message: Message) -> list[str]:
    try:
        return decode_ids(message.value())
    except MessageFormatError as bad:
        _log.error("%s:%s@%s: %s", message.topic(), message.partition(), message.offset(), bad)
        return []


#: Ids in one record of the done log: an eighth of a megabyte.
_IDS_PER_RECORD = 8_000


def decided(
    halves: Sequence[Half], verdict: Verdict, author: Author | None, check_count: int, done_name: str = ""
) -> Pending:
    """Return a transaction that a store has decided, COMMIT or DISCARD, and whose time has come.

    `done_name` is its name in the done log; empty: its id.
    """
    first, *others = halves
    if first.deliver_at_ms is not None and verdict is Verdict.COMMIT:
        first = first._replace(deliver_at_ms=None)
    pending = Pending(first._replace(part=(1, len(halves))) if others else first, 0)
    for offset, half in enumerate(others, 1):
        pending.add_part(offset, half._replace(part=(offset + 1, len(halves))))
    pending.verdict, pending.author = verdict, author
    if check_count:
        pending.check_count = check_count
    if done_name and done_name != first.transaction_id:
        pending.done_name = done_name
    return pending


@dataclass(slots=True)
class StoredBatch(DecidedBatch):
    """What one Kafka transaction settles of a shard."""

    @property
    def names(self) -> list[str]:
        """Its names in the done log."""
        return [pending.done_name or pending.half.transaction_id for pending in self.decided]

    def records(self) -> Iterator[bytes]:
        """Yield what is written into the done log."""
        names = self.names
        return (encode_ids(names[at : at + _IDS_PER_RECORD]) for at in range(0, len(names), _IDS_PER_RECORD))


class StoredBacklog(Backlog):
    """One shard. Used by the coordinator's thread; what it asks of the store, and `flush`, raise as the store does.

    `found` is what the done log said when the shard was taken over; `discarded` is the topic of what is discarded.
    """

    def __init__(self, shard: ShardBacklog, quarantine: TargetQuarantine, found: DoneRead, discarded: str) -> None:
        self._shard = shard
        self._quarantine = quarantine
        self._discarded = discarded
        self.queue = ReadyQueue(Delays(), self._let_go)
        # What the choice under way sets aside, and the store does not know to be held.
        self._stopped: list[Pending] = []
        #: Below it, all of the done log is settled, save for what is under way.
        self.done_end = found.end
        # By topic, why what waits for its sake waits, as the store knows it.
        self._explained: dict[str, str] = {}
        # What is to be noted in the store.
        self._notes: deque[Callable[[], object]] = deque([partial(shard.taken_over, sorted(found.ids))])

    @property
    def is_flushed(self) -> bool:
        """Whether the store knows all that was published."""
        return not self._notes

    def flush(self) -> None:
        """Note in the store what is to be noted."""
        while self._notes:
            self._notes[0]()
            self._notes.popleft()

    def next_batch(self, limit: int, blocking: Blocking, room_bytes: int) -> StoredBatch | None:
        """Take what can be published with others, and have the rest held."""
        if not self.queue.ready:
            for pending in self._shard.take(limit, room_bytes):
                self._enter(pending)

        chosen = self.queue.choose(limit, blocking, room_bytes)
        stopped, self._stopped = self._stopped, []
        self._hold(stopped)
        return self._batch(list(chosen.values()))

    def _batch(self, chosen: list[Pending]) -> StoredBatch | None:
        if not chosen:
            return None
        return StoredBatch(chosen, discarded_to=self._discarded, is_watched=self._shard.wants_visible(chosen))

    def _enter(self, pending: Pending) -> None:
        """Take in what the store gave, which may be there already; one that was committed may be discarded since."""
        known = self.queue.all.get(pending.half.transaction_id)
        if known is not None:
            if known.verdict is pending.verdict:
                return
            self.queue.forget(known)
        if (line := pending.half.line) is not None:
            self.queue.keys.add(line, pending)
        self.queue.add(pending)

    def _let_go(self, pending: Pending) -> None:
        if pending.dropped is None:
            self._stopped.append(pending)

    def trial(self, waiting: Sequence[Pending], fits: Callable[[Pending], bool]) -> StoredBatch | None:
        """Take the first of what is set aside, up to one that the store does not give now, or that does not fit."""
        found = self._shard.take_held([pending.half.transaction_id for pending in waiting]) if waiting else {}
        chosen: list[Pending] = []
        for pending in waiting:
            name = pending.half.transaction_id
            stored = found.get(name)
            if not pending.held:
                # It stood behind one that is not held any more.
                continue
            if stored is not None and stored.verdict is pending.verdict:
                pending.load(list(zip(stored.offsets, stored.halves, strict=True)))
                if not fits(pending):
                    break
                chosen.append(pending)
            elif stored is not None:
                self._enter(stored)
            elif name in found:
                self.queue.forget(pending)
            else:
                break
        tried = set(chosen)
        self._hold([pending for pending in waiting if pending.held and pending not in tried])
        return self._batch(chosen)

    def began(self, batch: StoredBatch) -> None:
        """Note that it is under way; the store leaves what was taken alone."""
        for pending in batch.decided:
            pending.in_flight = True

    def settled(self, batch: StoredBatch, done_end: int | None) -> list[str]:
        """Have what was published settled in the store."""
        self.done_end = max(self.done_end, done_end or 0)
        return self._published(batch.decided)

    def failed(self, batch: StoredBatch) -> None:
        """Give back what was taken."""
        self._give_back(batch.decided)

    def learned(self, batch: StoredBatch, found: DoneRead) -> list[str]:
        """Settle what the done log has, and give the rest back."""
        self.done_end = max(self.done_end, found.end)
        known = [name in found.ids for name in batch.names]
        self._give_back([pending for pending, is_done in zip(batch.decided, known, strict=True) if not is_done])
        return self._published([pending for pending, is_done in zip(batch.decided, known, strict=True) if is_done])

    def explain(self) -> None:
        """Note why things wait, where the reason of their topic is another one by now."""
        for topic in self.set_aside.topics():
            why = self._why(topic)
            if self._explained.get(topic) != why:
                self._explained[topic] = why
                # What is being tried is held again when that ends.
                self._hold([pending for pending in self.set_aside.fronts(topic) if not pending.in_flight])

    def _published(self, some: Sequence[Pending]) -> list[str]:
        names = [pending.half.transaction_id for pending in some]
        for pending in some:
            self.queue.forget(pending)
        if names:
            self._notes.append(partial(self._shard.published, names))
        return names

    def _give_back(self, some: Iterable[Pending]) -> None:
        held = []
        for pending in some:
            pending.in_flight = False
            if pending.held:
                held.append(pending)
        self._hold(held)

    def _hold(self, some: Sequence[Pending]) -> None:
        """Note that these are held, and why; their messages stay in the store."""
        for pending in some:
            pending.drop()
        if some:
            reasons = {pending.half.transaction_id: self._reason(pending) for pending in some}
            self._notes.append(partial(self._shard.hold, reasons))

    def _reason(self, pending: Pending) -> str:
        refused = self._quarantine.why_refused(pending.transaction_id)
        if refused is not None:
            return refused
        before = self.set_aside.behind(pending)
        if before is None:
            return self._why(self.set_aside.topic(pending.transaction_id) or "")
        why = self._quarantine.why_refused(before.transaction_id) or "which waits, too"
        return f"transaction {before.transaction_id}, before it in its key: {why}"

    def _why(self, topic: str) -> str:
        return f"{topic}: {self._quarantine.why(topic) or 'it is not known yet'}"
