"""A group of member processes on a topic, the messages for it, and the evidence of what happened.

A `Fleet` starts members, feeds messages and gathers what the members and the broker wrote down; `histories.examine`
judges it. Commits are read from the broker's own log of them, so none is missed, however short its life.
"""

from __future__ import annotations

import json
import random
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path

from confluent_kafka import Consumer, ConsumerGroupType, KafkaError, Producer, TopicPartition
from confluent_kafka import Message as ClientMessage
from confluent_kafka.admin import AdminClient

from histories import CLOCK_SLACK_S, Call, Commit, Place, Report, Span, examine
from kafka_tools import ends, read_all
from penstock.devbroker import DevBroker
from penstock.offsets import decode, owner_of
from waiting import wait_until

MEMBER = Path(__file__).with_name("member.py")

#: Client settings with which a group soon notices lost members.
CLASSIC: Mapping[str, str | int] = {"session.timeout.ms": 6000, "heartbeat.interval.ms": 300}
#: The same for KIP-848, whose timeouts are the broker's: see `KIP848_BROKER`.
KIP848: Mapping[str, str | int] = {"group.protocol": "consumer"}
#: Broker settings with which a group of the newer protocol soon notices them.
KIP848_BROKER: Mapping[str, str] = {
    "group.consumer.min.session.timeout.ms": "3000",
    "group.consumer.session.timeout.ms": "6000",
    "group.consumer.min.heartbeat.interval.ms": "200",
    "group.consumer.heartbeat.interval.ms": "300",
}


@dataclass(frozen=True, slots=True)
class MemberOptions:
    """The options of a member process. Times in seconds.

    Attributes:
        path: file to which it writes what it does.
        bootstrap_servers: addresses of the broker.
        topic: topic to consume.
        group: its group.
        workers: worker threads.
        max_in_flight: messages of one partition taken in and not done.
        commit_interval: time between commits.
        pace: the times that messages ask for are multiplied by this.
        stop_timeout: time that a stop may drain.
        config: librdkafka's keys.
    """

    path: str
    bootstrap_servers: str
    topic: str
    group: str
    workers: int = 8
    max_in_flight: int = 100
    commit_interval: float = 0.2
    pace: float = 1.0
    stop_timeout: float = 30.0
    config: Mapping[str, str | int] = field(default_factory=lambda: dict(CLASSIC))


@dataclass(frozen=True, slots=True)
class Look:
    """A member's report on itself at one moment: its partitions, whether it was revoking, and its counts."""

    time: float
    owned: tuple[int, ...]
    assigned: int
    revoked: int
    lost: int
    received: int
    commits: int
    failed_commits: int
    revoking: bool


class Member:
    """A member process and its output so far."""

    def __init__(self, name: str, options: MemberOptions) -> None:
        self.name = name
        self.path = Path(options.path)
        self.looks: list[Look] = []
        self._begun: dict[int, Call] = {}
        self._ended: dict[int, float] = {}
        self._read = 0
        with self.path.with_suffix(".log").open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, MEMBER, json.dumps(asdict(options))], stdout=log, stderr=subprocess.STDOUT
            )

    def refresh(self) -> None:
        """Read the new lines since the last call."""
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            file.seek(self._read)
            fresh = file.read()
        whole = fresh[: fresh.rfind(b"\n") + 1]
        self._read += len(whole)
        for line in whole.splitlines():
            kind, at, what, *rest = json.loads(line)
            if kind == "begin":
                key, partition, offset = rest
                self._begun[what] = Call(self.name, key, partition, offset, at, None)
            elif kind == "end":
                self._ended[what] = at
            else:
                self.looks.append(Look(at, tuple(what.pop("owned")), **what))

    @property
    def calls(self) -> list[Call]:
        """All its handler calls; interrupted ones have no end."""
        self.refresh()
        return [
            Call(one.instance, one.key, one.partition, one.offset, one.start, self._ended.get(serial))
            for serial, one in self._begun.items()
        ]

    @property
    def running_calls(self) -> list[Call]:
        """Its calls that have not ended."""
        return [call for call in self.calls if call.end is None]

    @property
    def handled(self) -> int:
        """How many calls ended."""
        self.refresh()
        return len(self._ended)

    @property
    def look(self) -> Look | None:
        """Its last report on itself; None before the first one."""
        self.refresh()
        return self.looks[-1] if self.looks else None

    @property
    def owned(self) -> tuple[int, ...]:
        """The partitions it had when it looked last."""
        look = self.look
        return look.owned if look is not None else ()

    @property
    def alive(self) -> bool:
        """Whether its process is there."""
        return self.process.poll() is None

    def signal(self, number: int) -> None:
        """Send its process a signal."""
        assert self.alive, f"{self.name} ended by itself: {self.log_end()}"
        self.process.send_signal(number)

    def terminate(self, timeout: float = 60.0) -> None:
        """Tell it to stop and wait until it has; its exit must be clean."""
        self.signal(signal.SIGTERM)
        assert self.process.wait(timeout) == 0, self.log_end()

    def kill(self) -> None:
        """End it with SIGKILL."""
        self.signal(signal.SIGKILL)
        assert self.process.wait(20) == -signal.SIGKILL

    def log_end(self) -> str:
        """Return the last lines of its output."""
        return "\n".join(self.path.with_suffix(".log").read_text().splitlines()[-15:])


class Fleet:
    """A topic, a group, its members and the fed messages. Made by `fleet`."""

    def __init__(self, broker: DevBroker, topic: str, partitions: int, folder: Path, group: str = "") -> None:
        self.broker = broker
        self.topic = topic
        self.group = group or f"group-{topic}"
        self.partitions = partitions
        self.members: list[Member] = []
        #: The key of each message that was fed, by its place.
        self.produced: dict[Place, str] = {}
        self._folder = folder
        self._failures: list[KafkaError] = []
        self._producer = Producer(
            {"bootstrap.servers": broker.bootstrap_servers, "enable.idempotence": True, "linger.ms": 5}
        )
        self._admin = AdminClient({"bootstrap.servers": broker.bootstrap_servers})
        self._observer = Consumer({"bootstrap.servers": broker.bootstrap_servers, "group.id": self.group})

    def start(self, **options: object) -> Member:
        """Start a member with options of `MemberOptions`; it has a name that none had before."""
        name = f"m{len(self.members)}"
        path = str(self._folder / f"{self.topic}-{name}.jsonl")
        member_options = MemberOptions(path, self.broker.bootstrap_servers, self.topic, self.group, **options)  # type: ignore[arg-type] # named options of a dataclass
        member = Member(name, member_options)
        self.members.append(member)
        return member

    def start_all(self, count: int, **options: object) -> list[Member]:
        """Start members and wait until they share all partitions among them."""
        members = [self.start(**options) for _ in range(count)]
        self.wait_shared(members)
        return members

    def wait_shared(self, members: Iterable[Member], timeout: float = 60.0) -> None:
        """Wait until these members, and each of them, own all partitions."""
        wanted = list(members)
        everything = list(range(self.partitions))

        def shared() -> bool:
            for one in wanted:
                assert one.alive, f"{one.name} ended by itself: {one.log_end()}"
            owned = [one.owned for one in wanted]
            return all(owned) and sorted(number for numbers in owned for number in numbers) == everything

        wait_until(shared, timeout=timeout, interval=0.05)

    def feed(self, records: Iterable[tuple[str, float]], partition: int = -1) -> None:
        """Write messages durably: their key, and the seconds that their handler takes."""

        def delivered(error: KafkaError | None, message: ClientMessage) -> None:
            place, key = (message.partition(), message.offset()), message.key()
            if error is not None:
                self._failures.append(error)
            elif place[0] is not None and place[1] is not None and key is not None:
                self.produced[place[0], place[1]] = key.decode()

        before, count = len(self.produced), 0
        for key, seconds in records:
            self._producer.produce(
                self.topic, f"{seconds:.4f}", key=key.encode(), partition=partition, on_delivery=delivered
            )
            self._producer.poll(0)
            count += 1
        assert self._producer.flush(60) == 0
        assert not self._failures, self._failures
        assert len(self.produced) == before + count

    @property
    def calls(self) -> list[Call]:
        """All handler calls of all members."""
        return [call for member in self.members for call in member.calls]

    @property
    def handled(self) -> int:
        """How many calls ended, in all members."""
        return sum(member.handled for member in self.members)

    def committed(self) -> dict[int, int]:
        """Return the group's offset of each partition."""
        asked = [TopicPartition(self.topic, number) for number in range(self.partitions)]
        return {position.partition: position.offset for position in self._observer.committed(asked, timeout=10)}

    def partitions_wanted_back(self) -> bool:
        """Return whether the broker assigns a member some partitions but not all."""
        members = self._admin.describe_consumer_groups([self.group])[self.group].result(20).members
        # The newer protocol tells what a member has and what it shall have apart.
        meant = [len((member.target_assignment or member.assignment).topic_partitions) for member in members]
        return any(0 < count < self.partitions for count in meant)

    def uses_newer_protocol(self) -> bool:
        """Return whether the group's members use KIP-848 with the broker."""
        groups = self._admin.list_consumer_groups().result(20).valid
        return any(group.group_id == self.group and group.type == ConsumerGroupType.CONSUMER for group in groups)

    def wait_settled(self, timeout: float = 90.0) -> None:
        """Wait until the group has committed everything up to the end of the log."""
        wanted = ends(self.broker.bootstrap_servers, self.topic, self.partitions)

        def settled() -> bool:
            assert any(member.alive for member in self.members), self.members[-1].log_end()
            return self.committed() == wanted

        wait_until(settled, timeout=timeout, interval=0.1)

    def commits(self) -> list[Commit]:
        """Return every commit of the group that the broker took, in its order, on the members' clock."""
        behind = time.time() - time.monotonic()
        log = read_all(self.broker.bootstrap_servers, "__consumer_offsets", timeout=60, committed_only=False)
        found = [commit for message in log if (commit := _commit(message, self.group, self.topic, behind)) is not None]
        last = {commit.partition: commit.offset for commit in found}
        # A log that was read wrongly would tell of no fault either.
        assert last == {number: offset for number, offset in self.committed().items() if offset >= 0}
        assert all(commit.time < time.monotonic() + CLOCK_SLACK_S for commit in found)
        return found

    def report(self, doubtful: Mapping[str, Span] | None = None, *, may_resend: bool = False) -> Report:
        """Judge all that happened."""
        return examine(self.produced, self.calls, self.commits(), doubtful=doubtful, may_resend=may_resend)

    def close(self) -> None:
        """End what still runs."""
        for member in self.members:
            if member.alive:
                # A suspended process could not hear anything else.
                member.process.kill()
            member.process.wait()
        self._observer.close()


@contextmanager
def fleet(broker: DevBroker, topic: str, partitions: int, folder: Path) -> Iterator[Fleet]:
    """Make a fleet on a topic that exists, and end its processes afterwards."""
    made = Fleet(broker, topic, partitions, folder)
    try:
        yield made
    finally:
        made.close()


def messages(count: int, *, keys: int, seconds: Callable[[random.Random], float]) -> list[tuple[str, float]]:
    """Return messages for `Fleet.feed`: keys by turns, times as drawn, the same in every run."""
    chance = random.Random(count)  # noqa: S311 - a test's jitter
    return [(f"k{number % keys}", seconds(chance)) for number in range(count)]


def _commit(message: ClientMessage, group: str, topic: str, behind: float) -> Commit | None:
    """Read a record of the broker's offsets topic; None if it is not a commit of this group and topic.

    Layout: kafka's OffsetCommitKey.json (versions 0 and 1) and OffsetCommitValue.json (versions 0 to 4).
    """
    key, value = message.key(), message.value()
    if key is None or value is None or struct.unpack_from(">h", key)[0] > 1:
        return None
    named, at = _string(key, 2)
    of_topic, at = _string(key, at)
    if (named, of_topic) != (group, topic):
        return None
    version, offset = struct.unpack_from(">hq", value)
    # Version 3 put the leader epoch in between, version 4 made the string compact.
    metadata = _compact_string(value, 14) if version >= 4 else _string(value, 14 if version == 3 else 10)[0]
    (partition,) = struct.unpack_from(">i", key, at)
    found = decode(offset, metadata, owner_of(group, topic, partition))
    return Commit(
        partition,
        offset,
        message.timestamp()[1] / 1000 - behind,
        found.done if found is not None else (),
    )


def _compact_string(data: bytes, at: int) -> str:
    """Read a string behind its length plus one, which is a base-128 number with its lowest digit first."""
    length, shift = 0, 0
    while True:
        digit = data[at]
        at, length, shift = at + 1, length | (digit & 0x7F) << shift, shift + 7
        if digit < 0x80:
            return data[at : at + length - 1].decode()


def _string(data: bytes, at: int) -> tuple[str, int]:
    (length,) = struct.unpack_from(">h", data, at)
    return data[at + 2 : at + 2 + length].decode(), at + 2 + length


__all__ = ["CLASSIC", "KIP848", "KIP848_BROKER", "Fleet", "Look", "Member", "MemberOptions", "fleet", "messages"]
