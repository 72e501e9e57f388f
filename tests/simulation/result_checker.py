"""Checks what readers may see of results: each once and with its offset (exactly once), none missing, in order of keys.

A result says in its value which messages it is for, where they were fetched, and of which call of a handler it is; so
what is visible is judged by the logs alone. Of a transaction all is checked at the moment it takes effect.
"""

from __future__ import annotations

import json
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from zlib import crc32

from confluent_kafka import Message as ClientMessage

import penstock
from penstock.consumer.handlers.handler import Handler
from penstock.consumer.handlers.options import OnFailure
from penstock.consumer.retry_topics import ROUND
from penstock.message import Message
from penstock.offsets import decode, owner_of
from penstock.testing.memory.broker import TestBroker
from penstock.testing.memory.log import Place
from simulation.invariant_checker import InvariantBroken, InvariantChecker
from simulation.transaction_coordinator import OpenTransaction, positions_of

#: Where results go.
OUTPUTS = ("out0", "out1")
OUTPUT_PARTITIONS = 2
#: A message: topic, partition and offset, and its value.
Source = tuple[str, int, int, str]


@dataclass(frozen=True, slots=True)
class ResultRecord:
    """The content of a result's value.

    Attributes:
        sources: the messages it is for.
        number: its place among the results of its call for them.
        count: how many those are.
        call: names the call and the messages.
        writer: names the assignment that it was returned for.
    """

    sources: tuple[Source, ...]
    number: int
    count: int
    call: str
    writer: str

    @classmethod
    def read(cls, value: object) -> ResultRecord:
        """Read a value of `results_of`."""
        text = value if isinstance(value, bytes) else b""
        sources, number, count, call, writer = json.loads(text)
        return cls(tuple((one[0], one[1], one[2], one[3]) for one in sources), number, count, call, writer)


def results_of(messages: Sequence[Message], call: str, writer: str) -> list[penstock.Outgoing]:
    """Return none to three results for messages, over several topics and partitions; the same ones each time."""
    name = b" ".join(one.value or b"" for one in messages)
    drawn = crc32(name)
    count = drawn % 4
    sources = [(one.topic, one.partition, one.offset, (one.value or b"").decode()) for one in messages]
    made = []
    for number in range(count):
        value = json.dumps((sources, number, count, call, writer)).encode()
        chosen = drawn // 4 + number
        partition = chosen // 3 % OUTPUT_PARTITIONS if chosen % 3 == 0 else None
        topic = OUTPUTS[chosen // 5 % len(OUTPUTS)]
        made.append(penstock.Outgoing(topic, value, key=messages[0].key, partition=partition))
    return made


class ResultChecker:
    """Keeps the visible results.

    Args:
        checker: knows the messages that they are for.
        handlers: by topic.
        exactly_once: whether readers must see each once.
    """

    def __init__(
        self,
        group: str,
        checker: InvariantChecker,
        handlers: Mapping[str, Handler],
        broker: TestBroker,
        *,
        exactly_once: bool,
    ) -> None:
        self._group = group
        self._checker = checker
        self._handlers = handlers
        self._broker = broker
        self._exactly_once = exactly_once
        self._read: dict[Place, int] = defaultdict(int)
        # The results that are visible of each call; and by message the call whose results are visible.
        self._calls: dict[str, set[int]] = defaultdict(set)
        self._published: dict[str, str] = {}
        self._letters: set[tuple[str, bytes, int]] = set()
        #: Messages with a refused result: the retried result comes after those that were under way.
        self.refused: set[str] = set()
        # What has results for a batch that it was in.
        self._batched: set[Source] = set()
        #: Results that were seen.
        self.seen = 0
        checker.look = self.read

    # What becomes visible

    def read(self) -> None:
        """Read the records that became visible since the last call."""
        if self._exactly_once:
            # Seen whole, when their transactions took effect.
            return
        for place, record in self._new():
            self._take(ResultRecord.read(record.value()), place)

    def _new(self) -> Iterable[tuple[Place, ClientMessage]]:
        for topic in OUTPUTS:
            for partition in range(OUTPUT_PARTITIONS):
                place = topic, partition
                stable = self._broker.ends(topic, partition)[1]
                if stable > self._read[place]:
                    begin, self._read[place] = self._read[place], stable
                    log = self._broker.logs[place]
                    yield from ((place, one) for one in log.read(begin, stable, committed_only=True)[0])

    def _take(self, result: ResultRecord, place: Place) -> None:
        self.seen += 1
        numbers = self._calls[result.call]
        if self._exactly_once:
            for _, _, _, name in result.sources:
                former = self._published.setdefault(name, result.call)
                if former != result.call or result.number in numbers:
                    raise InvariantBroken(f"E1: a result of message {name} is visible twice: {result} in {place}")
        numbers.add(result.number)
        if len(numbers) == result.count:
            for topic, partition, offset, _ in result.sources:
                self._checker.published((topic, partition), offset)

    def refuse(self, value: bytes | None) -> None:
        """Note that a result was refused, if it is one."""
        if value is None or not value.startswith(b"[["):
            return
        for topic, partition, offset, _ in ResultRecord.read(value).sources:
            self.refuse_message((topic, partition), offset)

    def refuse_message(self, place: Place, offset: int) -> None:
        """Note that a result of a message was refused."""
        history = self._checker.histories[place]
        self.refused.add(history.ids[offset].decode())
        if self._handlers[history.topic].on_failure is OnFailure.DROP:
            self._checker.published(place, offset)

    # Transactions

    def takes_effect(self, transaction: OpenTransaction) -> None:
        """Check a transaction that is about to take effect.

        Raises:
            InvariantBroken: a result in it is visible already, or not whole, or without its offset, or an offset
                without its results.
        """
        # What was handled was read before; this reads nothing that depends on the transaction itself.
        self._checker.read_logs()
        calls = Counter[str]()
        wanted: dict[str, ResultRecord] = {}
        positions = positions_of(transaction.positions)
        for record in transaction.records:
            place = record.topic() or "", record.partition() or 0
            if place[0] in OUTPUTS:
                result = ResultRecord.read(record.value())
                calls[result.call] += 1
                wanted[result.call] = result
                self._take(result, place)
            else:
                self._take_forwarded(place, record, positions)
        for call, result in wanted.items():
            if calls[call] != result.count:
                raise InvariantBroken(f"E2: {calls[call]} of {result.count} results of {result.sources} are visible")
            for topic, partition, offset, name in result.sources:
                if not self._tells((topic, partition), offset, positions):
                    raise InvariantBroken(f"E3: a result of message {name} is visible without its offset: {result}")
        for request in transaction.positions:
            self._check_positions(request.points)

    def _take_forwarded(self, place: Place, record: ClientMessage, positions: Mapping[Place, tuple[int, str]]) -> None:
        """Take in a dead letter, or a message for a retry topic."""
        name = record.value()
        text = name if isinstance(name, bytes) else b""
        written = int(Message(record).header(ROUND) or 0)  # type: ignore[arg-type] # it has a place
        if (place[0], text, written) in self._letters:
            raise InvariantBroken(f"E1: message {text!r} is in {place[0]} twice")
        self._letters.add((place[0], text, written))
        places = self._checker.written_elsewhere(place, text, written)
        if not any(self._tells(where, offset, positions) for where, offset in places):
            raise InvariantBroken(f"E3: message {text!r} is in {place[0]} without its offset")

    def _tells(self, place: Place, offset: int, positions: Mapping[Place, tuple[int, str]]) -> bool:
        if place not in positions:
            return False
        point, metadata = positions[place]
        done = decode(point, metadata, owner_of(self._group, *place))
        return offset < point or (done is not None and offset in done)

    def _check_positions(self, points: Iterable[tuple[str, int, int, str | None]]) -> None:
        former = self._broker.committed(self._group)
        for topic, partition, offset, metadata in points:
            self._checker.may_be_done("a transaction", (topic, partition), offset, metadata)
            before = former.get((topic, partition))
            if before is not None and offset < before.offset:
                raise InvariantBroken(f"I3: a transaction takes {topic}[{partition}] from {before.offset} to {offset}")

    # The end

    def check_all(self) -> None:
        """Check the view of a committed reader at the end: none twice, all in order of keys.

        Raises:
            InvariantBroken: something is seen that must not be.
        """
        seen = Counter[tuple[str, int]]()
        logs = {}
        for topic in OUTPUTS:
            for partition in range(OUTPUT_PARTITIONS):
                records = self._broker.records(topic, partition)
                results = [ResultRecord.read(one.value()) for one in records]
                keyless = {result.call for one, result in zip(records, results, strict=True) if one.key() is None}
                logs[f"{topic}[{partition}]"] = results, keyless
                for one in results:
                    seen.update((name, one.number) for _, _, _, name in one.sources)
        every = [result for results, _ in logs.values() for result in results]
        self._batched = {source for one in every if len(one.sources) > 1 for source in one.sources}
        for where, (results, keyless) in logs.items():
            self._check_order(where, results, keyless)
        if self._exactly_once:
            twice = [what for what, count in seen.items() if count > 1]
            if twice:
                raise InvariantBroken(f"E1: a reader sees {twice} more than once")
            missing = {
                name: call for name, call in self._published.items() if not any((name, n) in seen for n in range(3))
            }
            if missing:
                raise InvariantBroken(f"E4: no reader sees what was committed of {missing}")
            lettered = {name.decode() for _, name, written in self._letters if not written} & self._published.keys()
            if lettered:
                raise InvariantBroken(f"E1: {lettered} are published and given up")

    def _check_order(self, where: str, results: Sequence[ResultRecord], keyless: Collection[str]) -> None:
        last: dict[tuple[Hashable, str], tuple[int, int]] = {}
        first: dict[tuple[Hashable, str], list[int]] = defaultdict(list)
        for one in results:
            if len(one.sources) > 1 or (chain := self._chain(one.sources[0])) is None:
                continue
            offset = one.sources[0][2]
            writer = "" if self._exactly_once else one.writer
            if (offset, one.number) < last.get((chain, writer), (-1, -1)):
                raise InvariantBroken(f"E5: in {where} {one} stands behind {last[chain, writer]} of its key {chain}")
            last[chain, writer] = offset, one.number
            if not self._exactly_once and (
                # One owner was done with it, or gave it up; its successor, which did not hear of that, handled it.
                one.sources[0][3].encode() in self._checker.without_results
                # It may have been written to another partition before; so was what a batch was first.
                or one.call in keyless
                or one.sources[0] in self._batched
            ):
                continue
            known = first[chain, ""]
            if not known or offset > known[-1]:
                known.append(offset)
            elif offset != known[bisect_left(known, offset)]:
                raise InvariantBroken(f"E5: in {where} {one} comes for the first time behind {known[-1]} of its key")

    def _chain(self, source: Source) -> Hashable | None:
        """Return the line in which a message's results keep their order; None without an order."""
        topic, partition, offset, name = source
        history = self._checker.histories[topic, partition]
        if history.is_retry or name in self.refused or self._handlers[topic].order.value == "none":
            return None
        identity = history.identities_ever.get(offset)
        return None if identity is None else (topic, partition, identity)


__all__ = ["OUTPUTS", "OUTPUT_PARTITIONS", "ResultChecker", "results_of"]
