"""Writes a record that the client library refuses, byte by byte: with a header whose name is not UTF-8.

Sources: Kafka's protocol guide, Produce v3, and its record batch format v2. Both are big-endian.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterable

from waiting import wait_until

#: The Castagnoli polynomial, reflected: the batch's checksum is a CRC-32C.
_POLYNOMIAL = 0x82F63B78
_PRODUCE = 0
_VERSION = 3
#: Unknown topic, not its leader: a topic that is new.
_NOT_YET = {3, 6}


def produce_raw(
    bootstrap: str, topic: str, records: Iterable[tuple[bytes, list[tuple[bytes, bytes]]]], *, timeout: float = 60.0
) -> None:
    """Write keys with headers to partition 0, durably. The broker must lead it.

    Args:
        bootstrap: address of the broker.
        topic: which.
        records: key and headers of each; the value is `x`.
        timeout: seconds the broker may take.
    """
    batch = _batch(list(records))
    name = topic.encode()
    # No transaction, acknowledged by all, in time; one topic.
    body = struct.pack(">hhiih", -1, -1, int(timeout * 1000), 1, len(name)) + name
    body += struct.pack(">iii", 1, 0, len(batch)) + batch
    request = struct.pack(">hhih", _PRODUCE, _VERSION, 1, -1) + body
    host, port = bootstrap.split(",", maxsplit=1)[0].rsplit(":", 1)

    def answer() -> int:
        with socket.create_connection((host, int(port)), timeout) as connection:
            connection.sendall(struct.pack(">i", len(request)) + request)
            with connection.makefile("rb") as stream:
                (size,) = struct.unpack(">i", stream.read(4))
                content = stream.read(size)
        # Correlation, topics, the name, partitions, partition: then its error.
        (error,) = struct.unpack_from(">h", content, 4 + 4 + 2 + len(name) + 4 + 4)
        assert error == 0 or error in _NOT_YET, f"the broker answered {error}"
        return int(error)

    wait_until(lambda: answer() == 0, timeout)


def _batch(records: list[tuple[bytes, list[tuple[bytes, bytes]]]]) -> bytes:
    last = len(records) - 1
    checked = struct.pack(">hiqqqhii", 0, last, 0, 0, -1, -1, -1, len(records))
    checked += b"".join(_record(place, key, headers) for place, (key, headers) in enumerate(records))
    after_length = struct.pack(">ibI", -1, 2, _crc32c(checked)) + checked
    return struct.pack(">qi", 0, len(after_length)) + after_length


def _record(place: int, key: bytes, headers: list[tuple[bytes, bytes]]) -> bytes:
    fields = b"\x00" + _varint(0) + _varint(place) + _sized(key) + _sized(b"x") + _varint(len(headers))
    fields += b"".join(_sized(name) + _sized(value) for name, value in headers)
    return _sized(fields)


def _sized(content: bytes) -> bytes:
    return _varint(len(content)) + content


def _varint(number: int) -> bytes:
    rest = number << 1  # zigzag, of what is never negative here
    written = bytearray()
    while rest > 0x7F:
        written.append(rest & 0x7F | 0x80)
        rest >>= 7
    return bytes([*written, rest])


def _crc32c(content: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in content:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (_POLYNOMIAL if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF
