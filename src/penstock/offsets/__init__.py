"""Pure offset tracking: which offsets are done, what may be committed, and the codec of the offset map."""

from penstock.offsets.metadata import MAX_METADATA_CHARS, OffsetMap, decode, encode, joined, owner_of
from penstock.offsets.tracker import Block, CommitPoint, Tracker

__all__ = [
    "MAX_METADATA_CHARS",
    "Block",
    "CommitPoint",
    "OffsetMap",
    "Tracker",
    "decode",
    "encode",
    "joined",
    "owner_of",
]
