"""How each fault of a campaign is done and undone.

A fault holds the lock of its target, so that no two meet at the same one, and makes sure that it happened.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

from confluent_kafka import KafkaException
from confluent_kafka.admin import AdminClient

from endurance.checker import Fault
from endurance.plan import INPUTS, KINDS, OUTPUTS, PARTITIONS, TARGETS, Planned
from endurance.stage import SEGMENT_BYTES, Stage
from kafka_tools import limit
from support.replication import reassign

_log = logging.getLogger(__name__)

#: Kafka's APIs by number: what is late on a slow network.
_ALL_APIS = range(100)
_SLOW_S = 0.4
#: Bytes that a topic takes while it refuses, and what it takes otherwise.
_REFUSED_BYTES, _USUAL_BYTES = 250, 1_048_588
_JUMP_S = 3600.0
#: Seconds between two tries to undo a fault, for which the cluster must answer.
_TRY_S = 1.0
_TRIES = 120

Harm = Callable[[Stage, str, random.Random], contextlib.AbstractContextManager[None]]


class NotMetError(Exception):
    """The fault was armed and had no effect."""


@contextlib.contextmanager
def killed_process(stage: Stage, target: str, _: random.Random) -> Iterator[None]:
    """Kill a process; it is started again afterwards."""
    stage.roles[target].kill()
    yield
    stage.roles[target].start()


@contextlib.contextmanager
def frozen_process(stage: Stage, target: str, _: random.Random) -> Iterator[None]:
    """Freeze a process."""
    role = stage.roles[target]
    role.signal(signal.SIGSTOP)
    try:
        yield
        if state_of(role.process.pid) != "T":
            raise NotMetError
    finally:
        role.signal(signal.SIGCONT)


@contextlib.contextmanager
def jumping_clock(stage: Stage, target: str, chance: random.Random) -> Iterator[None]:
    """Let the wall clock of a process be off by an hour."""
    path = stage.folder / f"{target}.clock"
    path.write_text(str(chance.choice((-_JUMP_S, _JUMP_S))))
    try:
        yield
    finally:
        path.unlink()


@contextlib.contextmanager
def killed_broker(stage: Stage, _: str, chance: random.Random) -> Iterator[None]:
    """Kill a node of Kafka."""
    node = chance.randint(1, 3)
    stage.cluster.kill(node)
    yield
    stage.cluster.restart(node)
    stage.cluster.wait_in_sync()


@contextlib.contextmanager
def frozen_broker(stage: Stage, _: str, chance: random.Random) -> Iterator[None]:
    """Freeze a node of Kafka."""
    node = chance.randint(1, 3)
    stage.cluster.freeze(node)
    try:
        yield
    finally:
        stage.cluster.thaw(node)
    stage.cluster.wait_in_sync()


@contextlib.contextmanager
def moved_partitions(stage: Stage, _: str, chance: random.Random) -> Iterator[None]:
    """Give all partitions of some topics other leaders and another order of replicas."""
    for topic in chance.sample((*INPUTS, *OUTPUTS, *TARGETS), 4):
        nodes = chance.sample((1, 2, 3), 3)
        reassign(
            stage.cluster,
            topic,
            {number: [nodes[(number + place) % 3] for place in range(3)] for number in range(PARTITIONS)},
        )
    yield


@contextlib.contextmanager
def restarted_postgresql(stage: Stage, _: str, chance: random.Random) -> Iterator[None]:
    """Stop PostgreSQL, in order or as a crash would, for as long as the fault lasts."""
    with stage.postgresql_stopped(chance.choice(("fast", "immediate"))):
        yield


@contextlib.contextmanager
def cut_network(stage: Stage, _: str, __: random.Random) -> Iterator[None]:
    """Cut half of the processes off from Kafka."""
    try:
        if sum([proxy.cut() for proxy in stage.proxies]) == 0:
            raise NotMetError
        yield
    finally:
        for proxy in stage.proxies:
            proxy.heal()


@contextlib.contextmanager
def slow_network(stage: Stage, _: str, __: random.Random) -> Iterator[None]:
    """Let each answer of Kafka reach half of the processes late."""
    before = sum(proxy.requests.total() for proxy in stage.proxies)
    for proxy in stage.proxies:
        proxy.late = dict.fromkeys(_ALL_APIS, _SLOW_S)
    try:
        yield
        if sum(proxy.requests.total() for proxy in stage.proxies) == before:
            raise NotMetError
    finally:
        for proxy in stage.proxies:
            proxy.late = {}


@contextlib.contextmanager
def refusing_topic(stage: Stage, target: str, _: random.Random) -> Iterator[None]:
    """Let a target topic refuse each message."""
    admin = AdminClient({"bootstrap.servers": stage.cluster.bootstrap_servers})
    try:
        try:
            limit(admin, target, _REFUSED_BYTES)
        except (KafkaException, AssertionError) as error:  # a node is away, as another fault has it
            raise NotMetError from error
        yield
    finally:
        _until_done(functools.partial(limit, admin, target, _USUAL_BYTES))


@contextlib.contextmanager
def full_disk(stage: Stage, target: str, _: random.Random) -> Iterator[None]:
    """Let the file store find no room: its next segment would be larger than its process's files may be.

    A segment's room is set aside as a whole, which fails as it does on a full disk, and what was set aside before can
    still be written.
    """
    role = stage.roles[target]
    before = _times_said(role.log, "has no room")
    role.limit_files(SEGMENT_BYTES - 1)
    try:
        yield
        if _times_said(role.log, "has no room") == before:
            raise NotMetError
    finally:
        role.limit_files(-1)


@contextlib.contextmanager
def rolling_deploy(stage: Stage, _: str, __: random.Random) -> Iterator[None]:
    """Replace each process in turn: it ends in order, and then its successor starts."""
    for role in stage.roles.values():
        with role.lock:
            role.terminate()
            role.start()
    yield


HARMS: dict[str, Harm] = {
    "process killed": killed_process,
    "process frozen": frozen_process,
    "broker killed": killed_broker,
    "broker frozen": frozen_broker,
    "partitions moved": moved_partitions,
    "PostgreSQL restarted": restarted_postgresql,
    "network cut": cut_network,
    "network slow": slow_network,
    "topic refuses": refusing_topic,
    "disk full": full_disk,
    "clock jumped": jumping_clock,
    "rolling deploy": rolling_deploy,
}


class Harming:
    """Injects the planned faults, each on its own thread; `faults` has those that happened."""

    def __init__(self, stage: Stage, planned: list[Planned], seed: int) -> None:
        self._stage, self._planned, self._seed = stage, planned, seed
        others = {target for kind in KINDS for target in kind.targets} - stage.roles.keys()
        self._locks = {target: threading.Lock() for target in others}
        self._locks |= {name: role.lock for name, role in stage.roles.items()}
        self.faults: list[Fault] = []
        #: Faults without an effect: their target was busy, or nothing ran into them.
        self.not_met: Counter[str] = Counter()
        #: What the harness itself could not do, which makes the campaign void.
        self.failures: list[str] = []

    def run(self) -> None:
        """Do all that was planned, and return when all of it is undone."""
        begun, threads = time.monotonic(), []
        for number, planned in enumerate(self._planned):
            # The plan is the campaign's: it is a rhythm, not a wait for something.
            time.sleep(max(0.0, begun + planned.at_s - time.monotonic()))
            thread = threading.Thread(target=self._harm, args=(number, planned), name=f"fault-{number}", daemon=True)
            thread.start()
            threads.append(thread)
        for thread in threads:
            thread.join()

    def _harm(self, number: int, planned: Planned) -> None:
        kind, target = planned.kind, planned.target
        lock = self._locks[target]
        if not lock.acquire(blocking=False):
            self.not_met[kind.name] += 1
            return
        begin = time.monotonic()
        _log.info("%s: %s for %.1f s", kind.name, target, planned.seconds)
        try:
            with HARMS[kind.name](self._stage, target, random.Random(f"{self._seed} {number}")):  # noqa: S311 - no secret
                time.sleep(planned.seconds)
            self.faults.append(Fault(kind.name, target, begin, time.monotonic()))
        except NotMetError:
            self.not_met[kind.name] += 1
        except Exception as error:  # noqa: BLE001 - the result shows it
            _log.exception("%s of %s failed", kind.name, target)
            self.failures.append(f"{kind.name} of {target}: {error!r}")
        finally:
            lock.release()


def state_of(pid: int) -> str:
    """Return the letter of a process's state."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def _times_said(log: Path, text: str) -> int:
    return log.read_text(errors="replace").count(text)


def _until_done(undo: Callable[[], None]) -> None:
    """Undo a fault, as often as it takes until the cluster answers."""
    for left in reversed(range(_TRIES)):
        try:
            undo()
        except Exception:
            if not left:
                raise
            time.sleep(_TRY_S)
        else:
            return
