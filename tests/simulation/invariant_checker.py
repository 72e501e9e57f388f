"""Checks the invariants I1 to I4 of a simulation, from the records of the logs and the returns of handlers.

It sees calls of handlers begin and end, and commits leave, but reads no state of the engine: so it cannot be wrong in
the way the engine is. `simulation.balance_checker` checks the engine's own counts, I4 and I5.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Callable, Container, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count

from confluent_kafka import Message as ClientMessage
from confluent_kafka import TopicPartition

from penstock.consumer.assignments import Assignment
from penstock.consumer.handlers.handler import Handler, orderings_of
from penstock.consumer.handlers.options import OnFailure
from penstock.consumer.retry_topics import ROUND, retry_topics
from penstock.message import Message, Record
from penstock.offsets import decode, owner_of
from penstock.testing.memory.broker import TestBroker
from penstock.testing.memory.log import Place


class InvariantBroken(AssertionError):  # noqa: N818 - it is a finding
    """A simulation found that an invariant does not hold."""


@dataclass(slots=True)
class PartitionHistory:
    """The known state of one partition.

    Attributes:
        topic: the handler's topic; for a retry topic, the one its messages come from.
        is_retry: whether it is a retry topic.
        ids: of each committed message that ever stood there, by offset, what names it in all topics: its value.
        undone: offsets of those that are not done, rising.
        chains: the same of each identity: messages that wait for each other, without those that were handled.
        identities: of those that are not done, what waits for each other.
        identities_ever: the same of all.
        excused: offsets below this one are not checked: the log was cut, and they were given twice.
    """

    topic: str
    is_retry: bool
    ids: dict[int, bytes] = field(default_factory=dict)
    undone: list[int] = field(default_factory=list)
    chains: dict[Hashable, list[int]] = field(default_factory=lambda: defaultdict(list))
    identities: dict[int, Hashable] = field(default_factory=dict)
    identities_ever: dict[int, Hashable] = field(default_factory=dict)
    excused: int = 0


@dataclass(frozen=True, slots=True)
class HandlerCall:
    """A call of a handler that is under way, or a completion that is put off.

    Attributes:
        messages: what it was given.
        identities: what waits for it.
        assignments: what they belong to.
        writer: names that for good.
    """

    messages: tuple[Message, ...]
    identities: frozenset[Hashable]
    assignments: tuple[Assignment, ...]
    writer: str

    @property
    def assignment(self) -> Assignment:
        """The assignment of the first message; its route is that of all."""
        return self.assignments[0]


class InvariantChecker:
    """Keeps the history of each partition of one group, and checks calls and commits by it.

    Every message has its own value, which identifies it in all topics.

    Args:
        group: the group.
        handlers: by topic.
        broker: where to look.
    """

    def __init__(self, group: str, handlers: Mapping[str, Handler], broker: TestBroker) -> None:
        self._group = group
        self._broker = broker
        self._handlers = dict(handlers)
        self._orders = orderings_of(handlers, 1)
        self._sources = dict.fromkeys(handlers, False)
        self._topics = {topic: topic for topic in handlers}
        self._dead_letter_topics: set[str] = set()
        for topic, one in handlers.items():
            for name in retry_topics(group, topic, one.retry_delays):
                self._topics[name] = topic
                self._sources[name] = True
            if one.on_failure is OnFailure.DEAD_LETTER:
                self._dead_letter_topics.add(one.dead_letter_topic_of(topic))
        self._numbers = count(1)
        #: Messages that an owner was done with, or may have given up, without results.
        self.without_results: set[bytes] = set()
        self.histories: dict[Place, PartitionHistory] = {}
        #: Looks what else became visible.
        self.look: Callable[[], None] = lambda: None
        # Where each log was read to, and what is known of messages by name.
        self._read: dict[Place, int] = defaultdict(int)
        self._dead_lettered: set[bytes] = set()
        self._rounds: dict[tuple[bytes, int], list[tuple[Place, int]]] = defaultdict(list)
        self._written_rounds: set[tuple[bytes, int]] = set()
        self._places: dict[bytes, list[tuple[Place, int]]] = defaultdict(list)
        self._partitions: dict[str, int] = {}

    # What stands in the logs

    def read_logs(self) -> None:
        """Read the new records since the last call."""
        for topic in (*self._topics, *self._dead_letter_topics):
            partitions = self._partitions.get(topic)
            if partitions is None:
                if topic not in self._broker.topics():
                    continue
                partitions = self._partitions[topic] = self._broker.topics()[topic]
            for partition in range(partitions):
                place = topic, partition
                if topic in self._topics:
                    self._history(place)
                stable = self._broker.ends(topic, partition)[1]
                begin = self._read[place]
                if stable > begin:
                    for record in self._broker.logs[place].read(begin, stable, committed_only=True)[0]:
                        self._found(place, record)
                    self._read[place] = stable
        self.look()

    def _history(self, place: Place) -> PartitionHistory:
        history = self.histories.get(place)
        if history is None:
            history = self.histories[place] = PartitionHistory(self._topics[place[0]], self._sources[place[0]])
        return history

    def _found(self, place: Place, record: ClientMessage) -> None:
        value, offset = record.value(), record.offset()
        name = value if isinstance(value, bytes) else b""
        if place[0] in self._dead_letter_topics:
            self._dead_lettered.add(name)
            for where, at in self._places[name]:
                self._finish(self.histories[where], at)
        if place[0] not in self._topics or offset is None:
            return
        history = self._history(place)
        history.ids[offset] = name
        done = name in self._dead_lettered
        written = 0
        if history.is_retry:
            written = int(Message(record).header(ROUND) or 0)  # type: ignore[arg-type] # it has a place
            self._written_rounds.add((name, written))
            for where, at in self._rounds[name, written - 1]:
                self._finish(self.histories[where], at)
        self._rounds[name, written].append((place, offset))
        self._places[name].append((place, offset))
        if offset < history.excused or done or (name, written + 1) in self._written_rounds:
            return
        identity = self.identity(Message(record))  # type: ignore[arg-type] # it has a place
        accept = self._handlers[history.topic].filter
        if accept is not None and not accept(Message(record)):  # type: ignore[arg-type] # it has a place
            return
        insort(history.undone, offset)
        history.identities[offset] = history.identities_ever[offset] = identity
        if not history.is_retry:
            insort(history.chains[identity], offset)

    def identity(self, message: Message) -> Hashable:
        """Return the messages that wait for a message: by the handler's order, over all topics of its key space."""
        ordering = self._orders[self._topics[message.topic]]
        record: Record = message._record
        return ordering.identity(record)

    @staticmethod
    def _finish(history: PartitionHistory, offset: int) -> None:
        undone = history.undone
        at = bisect_left(undone, offset)
        if at == len(undone) or undone[at] != offset:
            return
        del undone[at]
        InvariantChecker._pass(history, offset)
        del history.identities[offset]

    @staticmethod
    def _pass(history: PartitionHistory, offset: int) -> None:
        """Release the messages that wait for a message."""
        chain = history.chains.get(history.identities.get(offset))
        if chain is not None:
            at = bisect_left(chain, offset)
            if at < len(chain) and chain[at] == offset:
                del chain[at]

    def done(self, messages: Iterable[Message]) -> None:
        """Note that a handler is done with these."""
        for message in messages:
            history = self.histories[message.topic, message.partition]
            self.without_results.add(history.ids[message.offset])
            self._finish(history, message.offset)

    def number(self) -> int:
        """Return a number that no other call has."""
        return next(self._numbers)

    def returned(self, messages: Iterable[Message]) -> None:
        """Note that a handler returned results for these: they are done when those are visible."""
        for message in messages:
            self._pass(self.histories[message.topic, message.partition], message.offset)

    def published(self, place: Place, offset: int) -> None:
        """Note that all results of a message are visible."""
        self._finish(self.histories[place], offset)

    def written_elsewhere(self, place: Place, name: bytes, written: int) -> list[tuple[Place, int]]:
        """Note that a message becomes visible among dead letters, or in a retry topic; return where it came from."""
        found = self._places[name] if place[0] in self._dead_letter_topics else self._rounds[name, written - 1]
        for where, offset in found:
            self._finish(self.histories[where], offset)
        return found

    def given_up(self, messages: Iterable[Message]) -> None:
        """Note that these failed; where the handler's choice is to drop them, that may be the end of them."""
        for message in messages:
            history = self.histories[message.topic, message.partition]
            self.without_results.add(history.ids[message.offset])
            if self._handlers[history.topic].on_failure is OnFailure.DROP:
                self._finish(history, message.offset)

    def removed(self, place: Place) -> None:
        """Record that a log was compacted, or that its beginning was deleted: missing records need not be handled."""
        self.read_logs()
        history = self._history(place)
        log = self._broker.logs[place]
        there = {record.offset() for record in log.records()}
        for offset in [one for one in history.undone if one not in there]:
            self._finish(history, offset)

    def cut(self, place: Place, former_end: int) -> None:
        """Note that a log was cut at its end: offsets up to its former end are given once more, and not checked."""
        history = self._history(place)
        history.excused = max(history.excused, former_end)
        end = self._broker.ends(*place)[2]
        for offset in [one for one in history.undone if one >= end]:
            self._finish(history, offset)
        self._read[place] = min(self._read[place], end)

    # What the engine does

    def may_begin(self, who: str, call: HandlerCall, owned: Iterable[Place], busy: Iterable[HandlerCall]) -> None:
        """Check a call that begins.

        Args:
            who: names the consumer.
            call: the call.
            owned: the partitions the consumer has.
            busy: the consumer's other calls and completions.

        Raises:
            InvariantBroken: it may not begin.
        """
        if not all(mine.active for mine in call.assignments):
            raise InvariantBroken(f"{who} began {call.messages} of an assignment that it gave back")
        for other in busy:
            if call.identities & other.identities:
                raise InvariantBroken(f"I1: {who} began {call.messages} while {other.messages} are under way")
        mine = set(owned)
        with_it: set[int] = set()
        for message in call.messages:
            place = message.topic, message.partition
            if place not in mine:
                raise InvariantBroken(f"{who} began {message}, whose partition it does not have")
            if place not in self.histories or message.offset not in self.histories[place].ids:
                self.read_logs()
            if place not in self.histories or message.offset not in self.histories[place].ids:
                raise InvariantBroken(f"{who} began {message}, which is not a committed message")
            # What is done elsewhere since the last look is found by another.
            if self._before(message, with_it):
                self.read_logs()
            if earlier := self._before(message, with_it):
                raise InvariantBroken(f"I2: {who} began {message} before {earlier}, which are not done")
            with_it.add(message.offset)

    def _before(self, message: Message, with_it: Container[int]) -> list[int]:
        """Return the messages that should be done before a message: within a batch, its place counts."""
        history = self.histories[message.topic, message.partition]
        if history.is_retry:
            return []
        chain = history.chains.get(self.identity(message), [])
        return [earlier for earlier in chain[: bisect_left(chain, message.offset)] if earlier not in with_it]

    def may_commit(self, who: str, points: Sequence[TopicPartition]) -> None:
        """Check commits that are about to be sent.

        Raises:
            InvariantBroken: one tells of something as done that is not.
        """
        self.read_logs()
        for point in points:
            self.may_be_done(who, (point.topic, point.partition), point.offset, point.metadata)

    def may_be_done(self, who: str, place: Place, offset: int, metadata: str | None) -> None:
        """Check one commit of a partition; errors as `may_commit`."""
        undone = self.histories[place].undone
        if undone and undone[0] < offset:
            raise InvariantBroken(f"I3: {who} commits {offset} of {place} although {undone[0]} is not done")
        decoded = decode(offset, metadata, owner_of(self._group, *place))
        for done in () if decoded is None else decoded.done:
            at = bisect_left(undone, done.start)
            if at < len(undone) and undone[at] < done.stop:
                raise InvariantBroken(
                    f"I3: {who} commits {offset} of {place} with {done} done, although {undone[at]} is not"
                )

    def unfinished(self) -> list[str]:
        """Return the unfinished messages, by partition."""
        return [
            f"{topic}[{partition}]: {history.undone[:5]}"
            for (topic, partition), history in sorted(self.histories.items())
            if history.undone
        ]


__all__ = ["HandlerCall", "InvariantBroken", "InvariantChecker", "PartitionHistory"]
