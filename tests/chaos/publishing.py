"""A group that publishes what its handlers return, its members as processes, and the judgement of what readers saw.

A message is a number, and how many results it shall have; its key is the number modulo the count of keys. Half of the
messages go to a handler of single messages, half to one of batches. A result says the number, its part, and which call
of which member made it.
"""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import NamedTuple

from confluent_kafka import KafkaError, KafkaException, Producer

from chaos.fleet import CLASSIC
from kafka_tools import committed, ends, read_all
from penstock.devbroker import DevBroker
from waiting import wait_until

MEMBER = Path(__file__).with_name("publishing_member.py")
PARTITIONS = 6


def parts_of(number: int) -> int:
    """Return how many results a message has."""
    return 1 + number // 2 % 3


def is_batched(number: int, keys: int) -> bool:
    """Return whether a message goes to the handler of batches: every other key does."""
    return number % keys % 2 == 1


class Seen(NamedTuple):
    """A result as a reader saw it."""

    key: bytes
    number: int
    part: int
    #: The member and the call that made it.
    writer: str
    call: str


class SeenBatch(NamedTuple):
    """The list of messages of a batch, as a reader saw it."""

    writer: str
    call: str
    numbers: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class PublisherOptions:
    """The options of a member process. `seconds`: the time of a handler."""

    name: str
    group: str
    bootstrap_servers: str
    singles: str
    batched: str
    results: str
    batches: str
    exactly_once: bool
    workers: int = 8
    seconds: float = 0.001
    config: Mapping[str, str | int] = field(default_factory=lambda: dict(CLASSIC))


class Publishers:
    """The members of a group, the fed messages and the faults.

    Args:
        broker: which may be harmed.
        folder: where the members' logs go.
        options: options of the members, as `PublisherOptions`.
    """

    def __init__(self, broker: DevBroker, folder: Path, prefix: str = "", **options: object) -> None:
        self.broker = broker
        self.servers = broker.bootstrap_servers
        self.names = {one: f"{prefix}{one}" for one in ("singles", "batched", "results", "batches")}
        self.group = f"{prefix}publishers"
        for topic in self.names.values():
            broker.create_topic(topic, PARTITIONS)
        self._folder = folder
        self._options = options
        self.members: list[tuple[str, subprocess.Popen[bytes]]] = []
        self._leaving: list[tuple[str, subprocess.Popen[bytes]]] = []
        #: The member that is frozen now.
        self.frozen: subprocess.Popen[bytes] | None = None
        self._count = 0
        #: Set when feeding has ended; and the number of fed messages.
        self.stop_feeding = threading.Event()
        self.fed_count = 0
        #: What happened.
        self.kills = 0
        self.members_frozen = 0
        self.left = 0
        self.not_started = 0
        self.freezes = 0
        self.broker_kills = 0

    def start(self) -> None:
        """Start a member; it has a name that none had before."""
        name = f"m{self._count}"
        self._count += 1
        member = PublisherOptions(name, self.group, self.servers, **self.names, **self._options)  # type: ignore[arg-type] # named options of a dataclass
        with self._log(name).open("wb") as log:
            process = subprocess.Popen([sys.executable, MEMBER, json.dumps(asdict(member))], stdout=log, stderr=log)
        self.members.append((name, process))

    def kill_one(self) -> None:
        """Kill the member that is there for the longest time but one: the first meets all else that happens."""
        name, process = self.members.pop(1)
        if process.poll() is None:
            process.kill()
            process.wait(30)
            self.kills += 1
        else:
            self._require_no_broker(name)

    def freeze_first(self) -> None:
        """Stop the process of the member that is there for the longest time; `thaw` lets it go on."""
        name, process = self.members[0]
        if self.frozen is None and process.poll() is None and self._has_begun(name):
            process.send_signal(signal.SIGSTOP)
            self.frozen = process

    def thaw(self) -> None:
        """Let the member that was frozen go on."""
        if self.frozen is not None:
            self.frozen.send_signal(signal.SIGCONT)
            self.frozen = None
            self.members_frozen += 1

    def restart_ended(self) -> None:
        """Start members again that found no broker when they started, as a supervisor would."""
        for one in [one for one in self.members if one[1].poll() is not None]:
            self.members.remove(one)
            self._require_no_broker(one[0])
            self.start()

    def let_one_leave(self) -> None:
        """Tell the youngest member that has partitions to stop, but not the first; it leaves meanwhile."""
        working = [one for one in self.members[1:] if one[1].poll() is None and self._has_begun(one[0])]
        if working:
            self.members.remove(working[-1])
            self._leave(*working[-1])

    def _leave(self, name: str, process: subprocess.Popen[bytes]) -> None:
        process.send_signal(signal.SIGTERM)
        self._leaving.append((name, process))

    def wait_left(self) -> None:
        """Wait until all members that should stop have left: in order, or as well as they could without a broker."""
        for name, process in self._leaving:
            code = process.wait(60)
            assert code == 0 or "StoppedError" in self._end_of_log(name), self._end_of_log(name)
            self.left += code == 0
        self._leaving.clear()

    def freeze_broker(self, seconds: float) -> None:
        """Stop the broker's process for so long."""
        self.broker.freeze()
        # So long is the fault.
        time.sleep(seconds)
        self.broker.thaw()
        self.freezes += 1

    def kill_broker(self) -> None:
        """Kill the broker and bring it back."""
        self.broker.kill()
        assert not self.broker.running
        self.broker.restart()
        self.broker_kills += 1

    @contextmanager
    def fed(self, count: int, keys: int, seconds: float) -> Iterator[threading.Thread]:
        """Feed messages from a separate thread, over some seconds; all is fed when the block is left."""
        failures: list[object] = []
        thread = threading.Thread(target=self._feed, args=(count, keys, seconds, failures), daemon=True)
        thread.start()
        try:
            yield thread
        finally:
            thread.join(120 if self.stop_feeding.is_set() else seconds + 120)
        assert not thread.is_alive(), "the messages could not be fed"
        assert failures == []

    def _feed(self, count: int, keys: int, seconds: float, failures: list[object]) -> None:
        producer = Producer({"bootstrap.servers": self.servers, "enable.idempotence": True, "linger.ms": 5})

        def delivered(error: KafkaError | None, _message: object) -> None:
            if error is not None:
                failures.append(error)

        try:
            begun = time.monotonic()
            for number in range(count):
                if number % 10 == 0:
                    # The rate is part of the test.
                    self.stop_feeding.wait(max(0.0, begun + seconds * number / count - time.monotonic()))
                    producer.poll(0)
                if self.stop_feeding.is_set():
                    break
                topic = self.names["batched" if is_batched(number, keys) else "singles"]
                producer.produce(
                    topic, b"%d %d" % (number, parts_of(number)), b"k%d" % (number % keys), on_delivery=delivered
                )
                self.fed_count = number + 1
            assert producer.flush(100) == 0
        except BaseException as error:  # noqa: BLE001 - the test looks at them
            failures.append(error)

    def is_done(self) -> bool:
        """Return whether the group has committed all fed messages."""
        self.restart_ended()
        return all(
            {number: one.offset for number, one in committed(self.servers, self.group, topic, PARTITIONS).items()}
            == ends(self.servers, topic, PARTITIONS)
            for topic in (self.names["singles"], self.names["batched"])
        )

    def written(self) -> int:
        """Return how much was written to where results go, committed or not; 0 where a leader is not known."""
        try:
            return sum(ends(self.servers, self.names["results"], PARTITIONS, "read_uncommitted").values())
        except KafkaException:
            return 0

    def finish(self, timeout: float) -> None:
        """Wait until all is done, and have the members leave. The broker is left alone meanwhile."""
        wait_until(self.is_done, timeout, interval=1.0)
        wait_until(lambda: all(self._has_begun(name) for name, _ in self.members), 120)
        while self.members:
            self._leave(*self.members.pop())
        self.wait_left()

    def seen(self, *, committed_only: bool = True) -> list[Seen]:
        """Return the visible results; those of a key in the order of a reader."""
        found = []
        for message in read_all(self.servers, self.names["results"], timeout=240, committed_only=committed_only):
            number, part, writer, call = (message.value() or b"").decode().split("/")
            found.append(Seen(message.key() or b"", int(number), int(part), writer, call))
        return found

    def fed_twice(self) -> list[int]:
        """Return the numbers that the topics hold twice which members read: their results may be there twice."""
        read = (
            one for topic in ("singles", "batched") for one in read_all(self.servers, self.names[topic], timeout=240)
        )
        return sorted(
            int(n) for n, times in Counter((one.value() or b"").split()[0] for one in read).items() if times > 1
        )

    def batches(self) -> list[SeenBatch]:
        """Return the lists of messages in visible batches."""
        found = []
        for message in read_all(self.servers, self.names["batches"], timeout=240):
            writer, call, inside = (message.value() or b"").decode().split("/")
            found.append(SeenBatch(writer, call, tuple(map(int, inside.split(",")))))
        return found

    def close(self) -> None:
        """End what still runs."""
        for _, process in (*self.members, *self._leaving):
            process.kill()
            process.wait()

    def said(self, text: str) -> int:
        """Return how often members have logged a text."""
        return sum(path.read_text().count(text) for path in self._folder.glob(f"{self.group}-*.log"))

    def _log(self, name: str) -> Path:
        return self._folder / f"{self.group}-{name}.log"

    def _has_begun(self, name: str) -> bool:
        return " assigned: " in self._log(name).read_text()

    def _end_of_log(self, name: str) -> str:
        return "\n".join(self._log(name).read_text().splitlines()[-30:])

    def _require_no_broker(self, name: str) -> None:
        """Require that no broker answered a member that ended by itself at its start."""
        assert "BrokerConnectionError" in self._log(name).read_text(), self._end_of_log(name)
        self.not_started += 1


def faults_of_exactly_once(
    seen: Iterable[Seen], batches: Iterable[SeenBatch], count: int, keys: int, fed_twice: Collection[int] = ()
) -> list[str]:
    """Return the faults in what a reader of committed messages saw, as text.

    Each result is there once, in the order of its key; all results of a message are of one call, and so are those of
    all messages of a batch. Of messages that their producer wrote twice, only that they are there is asked.
    """
    all_seen = list(seen)
    found = by_key(one for one in all_seen if one.number not in fed_twice)
    wanted = {
        key: [result for result in results if result[0] not in fed_twice]
        for key, results in wanted_by_key(count, keys).items()
    }
    there = {one.number for one in all_seen}
    wrong = [f"{number}, which was fed twice, has no result" for number in fed_twice if number not in there]
    calls: dict[int, set[tuple[str, str]]] = defaultdict(set)
    for key in wanted.keys() | found.keys():
        results = [(one.number, one.part) for one in found.get(key, ())]
        wrong += _missing_and_strange(key, results, wanted.get(key, []))
        twice = sorted(one for one, times in Counter(results).items() if times > 1)
        if twice:
            wrong.append(f"{key!r} has {len(twice)} results twice, as {twice[:3]}")
        elif results != sorted(results):
            wrong.append(f"{key!r} has results out of order")
        for one in found.get(key, ()):
            calls[one.number].add((one.writer, one.call))
    wrong += [
        f"the results of {number} are of several calls: {made}" for number, made in calls.items() if len(made) > 1
    ]

    within = Counter(number for batch in batches for number in batch.numbers)
    batched = {number for number in range(count) if is_batched(number, keys)} - set(fed_twice)
    wrong += [f"{number} is in {within[number]} batches" for number in batched if within[number] != 1]
    for batch in batches:
        once = [number for number in batch.numbers if number not in fed_twice]
        torn = [number for number in once if calls[number] != {(batch.writer, batch.call)}]
        if torn:
            wrong.append(f"batch {batch.call} of {batch.writer} was torn: {torn[:3]} are of another call")
    return wrong


def faults_of_at_least_once(seen: Iterable[Seen], batches: Iterable[SeenBatch], count: int, keys: int) -> list[str]:
    """Return the faults in what a reader saw, as text.

    Every result is there. What each member wrote of a key is runs without a gap: a run begins with the first part of a
    message that is at or before the first one which had not all its results yet (where the group's offset stood then,
    at the highest), and goes on part by part, message by message, until its member ends or the partition moves.
    """
    found = by_key(seen)
    wanted = wanted_by_key(count, keys)
    wrong: list[str] = []
    for key in wanted.keys() | found.keys():
        order = wanted.get(key, [])
        results = found.get(key, [])
        wrong += _missing_and_strange(key, [(one.number, one.part) for one in results], order)
        place = {one: at for at, one in enumerate(order)}
        #: The highest place up to which everything was there, and where each member stood.
        highest, stood = -1, dict[str, int]()
        for one in results:
            at = place.get((one.number, one.part))
            if at is None:
                continue
            if at > highest + 1:
                wrong.append(f"{key!r}: {one} came before what is before it")
            if at != stood.get(one.writer, -2) + 1 and one.part:
                wrong.append(f"{key!r}: {one} is a run that begins in the middle of a message")
            stood[one.writer] = at
            highest = max(highest, at)
    within = {number for batch in batches for number in batch.numbers}
    missing = sorted({number for number in range(count) if is_batched(number, keys)} - within)
    if missing:
        wrong.append(f"{len(missing)} messages are in no batch, as {missing[:3]}")
    return wrong


def by_key(seen: Iterable[Seen]) -> dict[bytes, list[Seen]]:
    """Return results by key, in the order of a reader."""
    found: dict[bytes, list[Seen]] = defaultdict(list)
    for one in seen:
        found[one.key].append(one)
    return found


def wanted_by_key(count: int, keys: int) -> dict[bytes, list[tuple[int, int]]]:
    """Return what results there should be."""
    return {
        b"k%d" % key: [(number, part) for number in range(key, count, keys) for part in range(parts_of(number))]
        for key in range(keys)
    }


def _missing_and_strange(
    key: bytes, results: Sequence[tuple[int, int]], wanted: Sequence[tuple[int, int]]
) -> list[str]:
    missing, strange = set(wanted) - set(results), set(results) - set(wanted)
    return [
        f"{key!r} has {len(bad)} results that {what}, as {sorted(bad)[:3]}"
        for bad, what in ((missing, "are missing"), (strange, "nobody should have written"))
        if bad
    ]
