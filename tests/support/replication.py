"""The requests of Kafka's protocol that the client library lacks, or that would end it where a broker goes meanwhile.

Each is one question to one node on a connection of its own. Formats: the JSON files of Kafka's
`clients/src/main/resources/common/message`, in the versions named here.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Mapping, Sequence

#: Seconds within which a node answers.
_ANSWER_S = 5.0

GROUP, TRANSACTION = 0, 1

_FIND_COORDINATOR, _ELECT_LEADERS, _REASSIGN_PARTITIONS = (10, 1), (43, 1), (45, 0)


class WireError(Exception):
    """The node did not answer, or refused; asked again, it may do it."""


def find_coordinator(address: str, key: str, kind: int) -> int:
    """Return the node that coordinates the group or the transactional id, by `kind`."""
    answer = _ask(address, _FIND_COORDINATOR, _text(key) + struct.pack(">b", kind))
    _throttle, error, length = struct.unpack_from(">ihh", answer)
    _refused(error)
    node: int = struct.unpack_from(">i", answer, 8 + max(0, length))[0]
    return node


def elect_preferred_leaders(address: str) -> None:
    """Ask for the election of the first replica of every partition."""
    timeout_ms = int(_ANSWER_S * 1000)
    _ask(address, _ELECT_LEADERS, struct.pack(">bii", 0, -1, timeout_ms))


def reassign_partitions(address: str, topic: str, replicas: Mapping[int, Sequence[int]]) -> None:
    """Ask for those replicas of a topic, by partition."""
    partitions = b"".join(
        struct.pack(">iB", number, len(nodes) + 1) + struct.pack(f">{len(nodes)}ix", *nodes)
        for number, nodes in replicas.items()
    )
    name = topic.encode()
    body = struct.pack(">iB", int(_ANSWER_S * 1000), 2) + _varint(len(name) + 1) + name
    body += _varint(len(replicas) + 1) + partitions + bytes(2)
    answer = _ask(address, _REASSIGN_PARTITIONS, body, flexible=True)
    _refused(struct.unpack_from(">xih", answer)[1])


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


def _refused(error: int) -> None:
    if error:
        raise WireError(f"Kafka's error {error}")


def _text(text: str) -> bytes:
    encoded = text.encode()
    return struct.pack(">h", len(encoded)) + encoded


def _varint(number: int) -> bytes:
    """Write a number of Kafka's flexible versions: seven bits a byte, the lowest first."""
    low, rest = number & 0x7F, number >> 7
    return bytes([low | 0x80]) + _varint(rest) if rest else bytes([low])
