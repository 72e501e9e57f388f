"""The hash from a key to its lane."""

from __future__ import annotations

from xxhash import xxh3_64_intdigest


def lane_of(key: bytes, lanes: int, space: int = 0) -> int:
    """Return the lane of a key: xxh3-64 of the key, modulo the number of lanes.

    Equal keys of different key spaces are different keys: `space`, the number of the key space, is the hash's seed.

    The hash is the same in every process and on every machine. It is independent of CRC32 and murmur2, with which
    Kafka's clients choose partitions: with these, the keys of a partition would reach only
    `lanes / gcd(lanes, partitions)` lanes.
    """
    return xxh3_64_intdigest(key, space) % lanes
