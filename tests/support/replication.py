"""Replicas and leaders of an embedded broker of several nodes, moved about; and which node coordinates what.

The requests are those of Kafka's protocol that the client library lacks, or that would end it where a broker goes
meanwhile. Formats: the JSON files of Kafka's `clients/src/main/resources/common/message`, in the versions named here.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable, Mapping, Sequence

from confluent_kafka import KafkaException

from penstock.devbroker import DevBroker
from waiting import wait_until

#: Seconds within which a node answers, and within which a change is made.
_ANSWER_S = 5.0
_CHANGE_S = 150.0

_ELECT_LEADERS, _REASSIGN_PARTITIONS = (43, 1), (45, 0)


class WireError(Exception):
    """The node did not answer, or refused; asked again, it may do it."""


def coordinator_of(broker: DevBroker, group: str) -> int:
    """Return the node that coordinates a consumer group: the leader of the partition that Kafka's hash chooses."""
    return broker.leader_of("__consumer_offsets", java_hash(group) % len(replicas(broker, "__consumer_offsets")))


def transaction_coordinator_of(broker: DevBroker, transactional_id: str) -> int:
    """Return the node that coordinates a producer's transactions."""
    number = java_hash(transactional_id) % len(replicas(broker, "__transaction_state"))
    return broker.leader_of("__transaction_state", number)


def java_hash(text: str) -> int:
    """Return Java's hash code, made positive as Kafka does it."""
    code = 0
    for character in text:
        code = (31 * code + ord(character)) & 0xFFFFFFFF
    return abs(code - (1 << 32) if code >= 1 << 31 else code)


def replicas(broker: DevBroker, topic: str) -> dict[int, list[int]]:
    """Return the nodes of each partition, the preferred leader first, as a node that can answer knows them."""
    node = broker._answering()[0]
    return {number: found.replicas for number, found in node.metadata(topic).topics[topic].partitions.items()}


def elect_preferred(broker: DevBroker) -> None:
    """Let the first replica of each partition lead it, and return when all nodes say that it does."""

    def request() -> None:
        _ask(_any_node(broker), _ELECT_LEADERS, struct.pack(">bii", 0, -1, int(_ANSWER_S * 1000)))

    def done() -> bool:
        return all(
            partition.leader == partition.replicas[0]
            for node in broker._answering()
            for topic in node.metadata().topics.values()
            for partition in topic.partitions.values()
        )

    _until(request, done)


def reassign(broker: DevBroker, topic: str, wanted: Mapping[int, Sequence[int]]) -> None:
    """Move partitions of a topic to other nodes, and return when they are there and in sync."""
    partitions = b"".join(
        struct.pack(">iB", number, len(nodes) + 1) + struct.pack(f">{len(nodes)}ix", *nodes)
        for number, nodes in wanted.items()
    )
    name = topic.encode()
    body = struct.pack(">iB", int(_ANSWER_S * 1000), 2) + _varint(len(name) + 1) + name
    body += _varint(len(wanted) + 1) + partitions + bytes(2)

    def request() -> None:
        error = struct.unpack_from(">xih", _ask(_any_node(broker), _REASSIGN_PARTITIONS, body, flexible=True))[1]
        if error:
            raise WireError(f"Kafka's error {error}")

    _until(request, lambda: all(replicas(broker, topic)[number] == list(nodes) for number, nodes in wanted.items()))
    broker.wait_in_sync()


def _until(request: Callable[[], None], done: Callable[[], bool]) -> None:
    def is_done() -> bool:
        try:
            if done():
                return True
            request()
        except (WireError, KafkaException, LookupError):  # refused meanwhile
            return False
        return done()

    wait_until(is_done, _CHANGE_S)


def _any_node(broker: DevBroker) -> str:
    return broker._answering()[0].inside


def _ask(address: str, request: tuple[int, int], body: bytes, *, flexible: bool = False) -> bytes:
    """Return the answer behind the number of the request; a flexible one begins with a byte for its tags."""
    host, _, port = address.rpartition(":")
    header = struct.pack(">hhi", *request, 1) + _text("penstock-devbroker") + (b"\0" if flexible else b"")
    try:
        with socket.create_connection((host, int(port)), timeout=_ANSWER_S) as connection:
            connection.sendall(struct.pack(">i", len(header) + len(body)) + header + body)
            with connection.makefile("rb") as answers:
                (length,) = struct.unpack(">i", answers.read(4))
                return answers.read(length)[4:]
    except (OSError, struct.error) as error:
        raise WireError(f"{address} did not answer: {error}") from error


def _text(text: str) -> bytes:
    encoded = text.encode()
    return struct.pack(">h", len(encoded)) + encoded


def _varint(number: int) -> bytes:
    """Write a number of Kafka's flexible versions: seven bits a byte, the lowest first."""
    low, rest = number & 0x7F, number >> 7
    return bytes([low | 0x80]) + _varint(rest) if rest else bytes([low])
