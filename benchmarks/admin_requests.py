"""Which requests of the client library crash the process when a broker goes away. Each runs in its own process.

    python benchmarks/admin_requests.py            # all requests, one line each
    python benchmarks/admin_requests.py --rounds 6 describe_consumer_groups list_offsets

In each round every node is frozen, killed and restarted once. Groups, partitions and the nodes that clients use as
controller are spread over all nodes, so each kill affects each request. It uses two cores fully for a while.

Found with librdkafka 2.16.0 and Kafka 4.2.2: `describe_consumer_groups`, `alter_consumer_group_offsets`,
`list_consumer_group_offsets` and `delete_consumer_groups` crash the process (SIGABRT, 4 of 4 within three kills). With
`--timeout 3600` none of them does (six kills). The cause is a request whose time limit passes before its node is
reached; `tests/clients/test_clients_group_requests.py` shows that without a cluster.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from threading import Event
from typing import Any

from confluent_kafka import (
    Consumer,
    ConsumerGroupTopicPartitions,
    ElectionType,
    KafkaException,
    Producer,
    TopicCollection,
    TopicPartition,
)
from confluent_kafka.admin import (  # type: ignore[attr-defined] # not in its __all__
    AclBinding,
    AclBindingFilter,
    AclOperation,
    AclPermissionType,
    AdminClient,
    AlterConfigOpType,
    ConfigEntry,
    ConfigResource,
    NewPartitions,
    NewTopic,
    OffsetSpec,
    ResourcePatternType,
    ResourceType,
    ScramCredentialInfo,
    ScramMechanism,
    UserScramCredentialUpsertion,
)

from penstock import clients
from penstock.clients.answers import answered
from penstock.clients.factory import AdminClient as OurAdminClient
from penstock.clients.groups import alter_group_offsets, committed_offsets, describe_groups
from penstock.devbroker import DevBroker

TOPIC, PARTITIONS = "asked", 6
#: Seconds that a request may take, as in penstock.
ANSWER_S = 5.0
#: Requests of one process in flight at once.
SIDE_BY_SIDE = 4
#: Seconds between two requests of one process.
PAUSE_S = 0.1
#: Processes at once.
PROCESSES = 3


@dataclass(frozen=True, slots=True)
class World:
    """The groups, topics and partitions that a process asks about."""

    admin: AdminClient
    #: A group for each node, its coordinator.
    groups: Sequence[str]
    #: Number of the next request.
    number: int

    @property
    def group(self) -> str:
        """The next group, in turn."""
        return self.groups[self.number % len(self.groups)]

    @property
    def fresh(self) -> str:
        """A name that no request had before."""
        return f"fresh-{os.getpid()}-{self.number}"

    @property
    def partitions(self) -> list[TopicPartition]:
        """All partitions, at their beginnings."""
        return [TopicPartition(TOPIC, number, 0) for number in range(PARTITIONS)]


Answers = Iterable[Future[Any]]
_WAIT: dict[str, Any] = {"request_timeout": ANSWER_S}


def _acl(world: World) -> tuple[Any, ...]:
    return (
        ResourceType.TOPIC,
        world.fresh,
        ResourcePatternType.LITERAL,
        "User:nobody",
        "*",
        AclOperation.READ,
        AclPermissionType.ALLOW,
    )


def _resource() -> ConfigResource:
    entry = ConfigEntry("retention.ms", "600000", incremental_operation=AlterConfigOpType.SET)
    return ConfigResource(ResourceType.TOPIC, TOPIC, incremental_configs=[entry])


def _offsets(world: World) -> list[ConsumerGroupTopicPartitions]:
    return [ConsumerGroupTopicPartitions(world.group, world.partitions)]


def _user() -> list[UserScramCredentialUpsertion]:
    credentials = ScramCredentialInfo(ScramMechanism.SCRAM_SHA_256, 4096)
    return [UserScramCredentialUpsertion("clerk", credentials, b"secret")]


#: The admin requests, by name.
REQUESTS: Mapping[str, Callable[[World], Answers]] = {
    "describe_consumer_groups": lambda w: w.admin.describe_consumer_groups([w.group], **_WAIT).values(),
    "list_consumer_groups": lambda w: [w.admin.list_consumer_groups(**_WAIT)],
    "list_consumer_group_offsets": lambda w: w.admin.list_consumer_group_offsets(
        [ConsumerGroupTopicPartitions(w.group)], **_WAIT
    ).values(),
    "alter_consumer_group_offsets": lambda w: w.admin.alter_consumer_group_offsets(_offsets(w), **_WAIT).values(),
    "delete_consumer_groups": lambda w: w.admin.delete_consumer_groups([w.group], **_WAIT).values(),
    "describe_topics": lambda w: w.admin.describe_topics(TopicCollection([TOPIC]), **_WAIT).values(),
    "describe_cluster": lambda w: [w.admin.describe_cluster(**_WAIT)],
    "list_offsets": lambda w: w.admin.list_offsets(dict.fromkeys(w.partitions, OffsetSpec.latest()), **_WAIT).values(),
    "delete_records": lambda w: w.admin.delete_records(w.partitions, **_WAIT).values(),
    "describe_configs": lambda w: w.admin.describe_configs(
        [ConfigResource(ResourceType.TOPIC, TOPIC)], **_WAIT
    ).values(),
    "incremental_alter_configs": lambda w: w.admin.incremental_alter_configs([_resource()], **_WAIT).values(),
    "create_topics": lambda w: w.admin.create_topics([NewTopic(TOPIC, 1, -1)], **_WAIT).values(),
    "delete_topics": lambda w: w.admin.delete_topics([w.fresh], **_WAIT).values(),
    "create_partitions": lambda w: w.admin.create_partitions([NewPartitions(TOPIC, PARTITIONS)], **_WAIT).values(),
    "describe_acls": lambda w: [w.admin.describe_acls(AclBindingFilter(*_acl(w)), **_WAIT)],
    "create_acls": lambda w: w.admin.create_acls([AclBinding(*_acl(w))], **_WAIT).values(),
    "delete_acls": lambda w: w.admin.delete_acls([AclBindingFilter(*_acl(w))], **_WAIT).values(),
    "describe_user_scram_credentials": lambda w: [w.admin.describe_user_scram_credentials(**_WAIT)],
    "alter_user_scram_credentials": lambda w: w.admin.alter_user_scram_credentials(_user(), **_WAIT).values(),
    "elect_leaders": lambda w: [w.admin.elect_leaders(ElectionType.PREFERRED)],
}

#: penstock's own requests to coordinators: see `penstock.clients.groups`.
GUARDED: Mapping[str, Callable[[Clients, World], object]] = {
    "describe_groups": lambda c, w: c.guarded(lambda admin: describe_groups(admin, [w.group])[w.group]),
    "alter_group_offsets": lambda c, w: c.guarded(lambda admin: alter_group_offsets(admin, w.group, w.partitions)),
    "committed_offsets": lambda c, w: committed_offsets(c.address, {}, w.group, w.partitions, ANSWER_S),
}

#: Requests that wait for their answer: of other clients, and of the admin client without a future.
CALLS: Mapping[str, Callable[[Clients, World], object]] = {
    "list_topics": lambda _, w: w.admin.list_topics(timeout=ANSWER_S),
    "list_groups": lambda _, w: w.admin.list_groups(timeout=ANSWER_S),
    "Consumer.committed": lambda c, w: c.consumer.committed(w.partitions, timeout=ANSWER_S),
    "Consumer.commit": lambda c, w: c.consumer.commit(offsets=w.partitions, asynchronous=False),
    "Consumer.offsets_for_times": lambda c, w: c.consumer.offsets_for_times(w.partitions, timeout=ANSWER_S),
    "Consumer.get_watermark_offsets": lambda c, w: c.consumer.get_watermark_offsets(
        w.partitions[w.number % PARTITIONS], timeout=ANSWER_S
    ),
    "Consumer.consume": lambda c, _: c.consume(),
    "Producer of transactions": lambda c, w: c.transaction(w),
}


class Clients:
    """The clients of one process except its admin client, made at their first use."""

    def __init__(self, address: str, group: str) -> None:
        self.address = address
        self._group = group

    @cached_property
    def admin(self) -> OurAdminClient:
        """The client of guarded requests; replaced after a missing answer."""
        return clients.admin(self.address, {})

    def guarded(self, ask: Callable[[OurAdminClient], Future[Any]]) -> None:
        """Ask as penstock does, with a limit that is often too short; drop the client after a missing answer."""
        try:
            answered(ask(self.admin), ANSWER_S / 5)
        except KafkaException:
            del self.admin
            raise

    @cached_property
    def consumer(self) -> Consumer:
        """A consumer that is not in a group but has its offsets."""
        return Consumer({"bootstrap.servers": self.address, "group.id": self._group, "enable.auto.commit": False})

    @cached_property
    def member(self) -> Consumer:
        """The only member of a group."""
        config = {"group.id": f"member-{self._group}", "session.timeout.ms": 6000, "auto.offset.reset": "earliest"}
        member = Consumer({"bootstrap.servers": self.address, **config})
        member.subscribe([TOPIC])
        return member

    @cached_property
    def producer(self) -> Producer:
        """A producer with a transactional id."""
        config = {"transactional.id": f"tx-{self._group}", "transaction.timeout.ms": 10_000}
        producer = Producer({"bootstrap.servers": self.address, **config})
        producer.init_transactions(60)
        return producer

    def consume(self) -> None:
        """Read some messages as a member."""
        for message in self.member.consume(10, 0.1):
            if message.error() is not None:
                raise KafkaException(message.error())

    def transaction(self, world: World) -> None:
        """Write and commit offsets in a transaction; make a new producer if that is needed."""
        try:
            self.producer.begin_transaction()
            for place in world.partitions:
                self.producer.produce(place.topic, b"x", partition=place.partition)
            self.producer.send_offsets_to_transaction(
                world.partitions, self.consumer.consumer_group_metadata(), ANSWER_S
            )
            self.producer.commit_transaction(ANSWER_S)
        except KafkaException as error:
            if error.args[0].txn_requires_abort():
                self.producer.abort_transaction(60)
            elif error.args[0].fatal():
                del self.producer
            elif error.args[0].retriable():
                self.producer.commit_transaction(60)
            raise


def ask(request: str, address: str, groups: Sequence[str]) -> None:
    """Ask until SIGTERM and print the number of each answer. A child process runs this."""
    os.nice(10)  # each client that cannot connect uses a core, which the brokers need
    admin = AdminClient({"bootstrap.servers": address, "reconnect.backoff.ms": 250})
    others = Clients(address, groups[0])
    ended, outcomes, flying = Event(), Counter[str](), deque[Answers]()
    signal.signal(signal.SIGTERM, lambda *_: ended.set())
    _say("asking")
    for number in itertools.count():
        world = World(admin, groups, number)
        try:
            if request in REQUESTS:
                flying.append(list(REQUESTS[request](world)))
                answers = flying.popleft() if len(flying) == SIDE_BY_SIDE else []
                for answer in answers:
                    answer.result(3 * ANSWER_S)
            else:
                {**CALLS, **GUARDED}[request](others, world)
            outcomes["answered"] += 1
        except KafkaException as error:
            outcomes[error.args[0].name()] += 1
        except TimeoutError:
            outcomes["never answered"] += 1
        if ended.wait(PAUSE_S):
            _say(json.dumps(outcomes))
            os._exit(0)  # closing clients is not tested here


@dataclass(frozen=True, slots=True)
class Finding:
    """The end of a process that asked."""

    request: str
    #: Negative: the signal that ended it.
    exit_code: int
    #: Number of each answer, if it did not crash.
    outcomes: Mapping[str, int]
    #: Its last line on standard error.
    last_line: str


def try_requests(
    broker: DevBroker, requests: Sequence[str], rounds: int, timeout_s: float, folder: Path
) -> Iterator[Finding]:
    """Ask while each node is killed and restarted, `rounds` times, and yield the end of each process."""
    groups = _groups_on_each_node(broker)
    children = {request: _child(request, broker.bootstrap_servers, groups, timeout_s, folder) for request in requests}
    for _, node in itertools.product(range(rounds), (1, 2, 3)):
        time.sleep(0.5)  # requests are in flight
        broker.freeze(node)
        time.sleep(2.0)  # the time limit of some passes before the node is gone
        broker.kill(node)
        broker.restart(node)
        broker.wait_in_sync()
    time.sleep(2.0)
    for request, child in children.items():
        child.terminate()
        written, _ = child.communicate(timeout=120)
        lines = (folder / f"{request}.err").read_text().strip().splitlines() or [""]
        outcomes = json.loads(written.splitlines()[-1]) if child.returncode == 0 else {}
        yield Finding(request, child.returncode, outcomes, lines[-1])


def _child(request: str, address: str, groups: Sequence[str], timeout_s: float, folder: Path) -> subprocess.Popen[str]:
    arguments = ["--timeout", str(timeout_s), "--child", f"{address} {' '.join(groups)}", request]
    with (folder / f"{request}.err").open("wb") as errors:
        child = subprocess.Popen(  # noqa: S603 - this script
            [sys.executable, __file__, *arguments], stdout=subprocess.PIPE, stderr=errors, text=True
        )
    assert child.stdout is not None
    assert child.stdout.readline() == "asking\n"
    return child


def _groups_on_each_node(broker: DevBroker) -> list[str]:
    found: dict[int, str] = {}
    for number in itertools.count():
        name = f"asked-about-{number}"
        found.setdefault(broker.leader_of("__consumer_offsets", _partition_of(name)), name)
        if len(found) == 3:
            return list(found.values())
    raise AssertionError


def _partition_of(group: str) -> int:
    """Return the partition of __consumer_offsets by Java's hash of the group; the embedded broker has four."""
    code = 0
    for character in group:
        code = (31 * code + ord(character)) & 0xFFFFFFFF
    return abs(code - (1 << 32) if code >= 1 << 31 else code) % 4


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> None:
    """Print one line for each request."""
    arguments = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    arguments.add_argument("--rounds", type=int, default=4)
    arguments.add_argument("--timeout", type=float, default=ANSWER_S, help="seconds that the library gives a request")
    arguments.add_argument("--child", help=argparse.SUPPRESS)
    arguments.add_argument("requests", nargs="*", choices=[*REQUESTS, *CALLS, *GUARDED, []])
    chosen = arguments.parse_args()
    _WAIT["request_timeout"] = chosen.timeout
    if chosen.child:
        address, *groups = chosen.child.split()
        ask(chosen.requests[0], address, groups)
    requests = chosen.requests or [*REQUESTS, *CALLS, *GUARDED]
    with tempfile.TemporaryDirectory() as folder, DevBroker(nodes=3, start_timeout=300) as broker:
        broker.create_topic(TOPIC, PARTITIONS)
        for first in range(0, len(requests), PROCESSES):
            batch = requests[first : first + PROCESSES]
            for found in try_requests(broker, batch, chosen.rounds, chosen.timeout, Path(folder)):
                answers = ", ".join(f"{count} {name}" for name, count in found.outcomes.items())
                _say(f"{found.request:34} exit {found.exit_code:3}  {answers or found.last_line}")


if __name__ == "__main__":
    main()
