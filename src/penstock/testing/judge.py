"""The judge of a simulation: it knows what was written and what was handled, and checks the invariants I1 to I4.

Its knowledge is its own: what handlers returned, what stands in the logs. Of the engine it sees calls begin and end,
and commits leave; so it cannot be wrong in the way the engine is. `penstock.testing.accounts` checks the engine's own
books, I4 and I5.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Container, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from confluent_kafka import Message as ClientMessage
from confluent_kafka import TopicPartition

from penstock.consumer.assignments import Assignment
from penstock.consumer.handlers.handler import Handler, OnFailure, orderings_of
from penstock.consumer.retry_topics import ROUND, retry_topics
from penstock.message import Message, Record
from penstock.offsets import decode, owner_of
from penstock.testing.assignor import Place
from penstock.testing.broker import TestBroker


class InvariantBroken(AssertionError):  # noqa: N818 - it is a finding
    """A simulation found that an invariant does not hold."""


@dataclass(slots=True)
class Ledger:
    """What is known of one partition.

    Attributes:
        topic: the handler's topic; for a retry topic, the one its messages come from.
        is_retry: whether it is a retry topic.
        ids: of each committed message that ever stood there, by offset, what names it in all topics: its value.
        undone: offsets of those that are not done, rising.
        chains: the same of each identity: messages that wait for each other.
        excused: offsets below this one are not judged: the log was cut, and they were given twice.
    """

    topic: str
    is_retry: bool
    ids: dict[int, bytes] = field(default_factory=dict)
    undone: list[int] = field(default_factory=list)
    chains: dict[Hashable, list[int]] = field(default_factory=lambda: defaultdict(list))
    identities: dict[int, Hashable] = field(default_factory=dict)
    excused: int = 0


@dataclass(frozen=True, slots=True)
class HandlerCall:
    """A call of a handler that is under way, or a completion that is put off.

    Attributes:
        messages: what it was given.
        identities: what waits for it.
        assignment: what it belongs to.
    """

    messages: tuple[Message, ...]
    identities: frozenset[Hashable]
    assignment: Assignment


class Judge:
    """Keeps the ledgers of one group. Every message has a value of its own, by which it is known in all topics.

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
        self._letters: set[str] = set()
        for topic, one in handlers.items():
            for name in retry_topics(group, topic, one.retry_delays):
                self._topics[name] = topic
                self._sources[name] = True
            if one.on_failure is OnFailure.DEAD_LETTER:
                self._letters.add(one.dead_letter_topic.replace("{topic}", topic))
        self.ledgers: dict[Place, Ledger] = {}
        # Where each log was read to, and what is known of messages by name.
        self._read: dict[Place, int] = defaultdict(int)
        self._in_letters: set[bytes] = set()
        self._rounds: dict[tuple[bytes, int], list[tuple[Place, int]]] = defaultdict(list)
        self._written_rounds: set[tuple[bytes, int]] = set()
        self._places: dict[bytes, list[tuple[Place, int]]] = defaultdict(list)
        self._partitions: dict[str, int] = {}

    # What stands in the logs

    def look(self) -> None:
        """Read what was written since the last look."""
        for topic in (*self._topics, *self._letters):
            count = self._partitions.get(topic)
            if count is None:
                if topic not in self._broker.topics():
                    continue
                count = self._partitions[topic] = self._broker.topics()[topic]
            for partition in range(count):
                place = topic, partition
                if topic in self._topics:
                    self._ledger(place)
                stable = self._broker.ends(topic, partition)[1]
                begin = self._read[place]
                if stable > begin:
                    for record in self._broker.records_from(topic, partition, begin):
                        self._found(place, record)
                    self._read[place] = stable

    def _ledger(self, place: Place) -> Ledger:
        ledger = self.ledgers.get(place)
        if ledger is None:
            ledger = self.ledgers[place] = Ledger(self._topics[place[0]], self._sources[place[0]])
        return ledger

    def _found(self, place: Place, record: ClientMessage) -> None:
        value, offset = record.value(), record.offset()
        name = value if isinstance(value, bytes) else b""
        if place[0] in self._letters:
            self._in_letters.add(name)
            for where, at in self._places[name]:
                self._finish(self.ledgers[where], at)
        if place[0] not in self._topics or offset is None:
            return
        ledger = self._ledger(place)
        ledger.ids[offset] = name
        done = name in self._in_letters
        written = 0
        if ledger.is_retry:
            written = int(Message(record).header(ROUND) or 0)  # type: ignore[arg-type] # it has a place
            self._written_rounds.add((name, written))
            for where, at in self._rounds[name, written - 1]:
                self._finish(self.ledgers[where], at)
        self._rounds[name, written].append((place, offset))
        self._places[name].append((place, offset))
        if offset < ledger.excused or done or (name, written + 1) in self._written_rounds:
            return
        identity = self.identity(Message(record))  # type: ignore[arg-type] # it has a place
        accept = self._handlers[ledger.topic].filter
        if accept is not None and not accept(Message(record)):  # type: ignore[arg-type] # it has a place
            return
        insort(ledger.undone, offset)
        ledger.identities[offset] = identity
        if not ledger.is_retry:
            insort(ledger.chains[identity], offset)

    def identity(self, message: Message) -> Hashable:
        """Return what waits for a message: by the handler's order, over all topics of its key space."""
        ordering = self._orders[self._topics[message.topic]]
        record: Record = message._record  # noqa: SLF001 - the view's own record
        return ordering.identity(record)

    @staticmethod
    def _finish(ledger: Ledger, offset: int) -> None:
        undone = ledger.undone
        at = bisect_left(undone, offset)
        if at == len(undone) or undone[at] != offset:
            return
        del undone[at]
        chain = ledger.chains.get(ledger.identities.pop(offset))
        if chain is not None:
            at = bisect_left(chain, offset)
            if at < len(chain) and chain[at] == offset:
                del chain[at]

    def done(self, messages: Iterable[Message]) -> None:
        """Note that a handler is done with these."""
        for message in messages:
            self._finish(self.ledgers[message.topic, message.partition], message.offset)

    def given_up(self, messages: Iterable[Message]) -> None:
        """Note that these failed; where the handler's choice is to drop them, that may be the end of them."""
        for message in messages:
            ledger = self.ledgers[message.topic, message.partition]
            if self._handlers[ledger.topic].on_failure is OnFailure.DROP:
                self._finish(ledger, message.offset)

    def removed(self, place: Place) -> None:
        """Note that a log was compacted, or that its beginning was deleted: what is gone need not be handled."""
        self.look()
        ledger = self._ledger(place)
        there = {record.offset() for record in self._broker.records_from(*place, 0)}
        for offset in [one for one in ledger.undone if one not in there]:
            self._finish(ledger, offset)

    def cut(self, place: Place, former_end: int) -> None:
        """Note that a log was cut at its end: offsets up to its former end are given once more, and not judged."""
        ledger = self._ledger(place)
        ledger.excused = max(ledger.excused, former_end)
        end = self._broker.ends(*place)[2]
        for offset in [one for one in ledger.undone if one >= end]:
            self._finish(ledger, offset)
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
        if not call.assignment.active:
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
            if place not in self.ledgers or message.offset not in self.ledgers[place].ids:
                self.look()
            if place not in self.ledgers or message.offset not in self.ledgers[place].ids:
                raise InvariantBroken(f"{who} began {message}, which is not a committed message")
            # What is done elsewhere since the last look is found by another.
            if self._before(message, with_it):
                self.look()
            if earlier := self._before(message, with_it):
                raise InvariantBroken(f"I2: {who} began {message} before {earlier}, which are not done")
            with_it.add(message.offset)

    def _before(self, message: Message, with_it: Container[int]) -> list[int]:
        """Return what should have been done before a message: of one batch, its place in it counts."""
        ledger = self.ledgers[message.topic, message.partition]
        if ledger.is_retry:
            return []
        chain = ledger.chains.get(self.identity(message), [])
        return [earlier for earlier in chain[: bisect_left(chain, message.offset)] if earlier not in with_it]

    def may_commit(self, who: str, points: Sequence[TopicPartition]) -> None:
        """Check commits that are about to be sent.

        Raises:
            InvariantBroken: one tells of something as done that is not.
        """
        self.look()
        for point in points:
            undone = self.ledgers[point.topic, point.partition].undone
            if undone and undone[0] < point.offset:
                raise InvariantBroken(f"I3: {who} commits {point} although {undone[0]} is not done")
            told = decode(point.offset, point.metadata, owner_of(self._group, point.topic, point.partition))
            for done in () if told is None else told.done:
                at = bisect_left(undone, done.start)
                if at < len(undone) and undone[at] < done.stop:
                    raise InvariantBroken(f"I3: {who} commits {point} with {done} done, although {undone[at]} is not")

    def unfinished(self) -> list[str]:
        """Return what is not done, by partition."""
        return [
            f"{topic}[{partition}]: {ledger.undone[:5]}"
            for (topic, partition), ledger in sorted(self.ledgers.items())
            if ledger.undone
        ]


__all__ = ["HandlerCall", "InvariantBroken", "Judge", "Ledger"]
