"""Sizes of messages in bytes, as the limits count them: key, value and headers, and the objects around them.

The client has the length of a value alone. A key costs a call a message; headers cost as much as all the rest of the
routing, for they are made Python objects. So of many messages at once some are a sample for the others, as long as none
of a partition had a key or headers of a size that matters; from then on each is measured.
"""

from __future__ import annotations

from collections.abc import Sequence

from penstock.consumer.assignments import Assignment
from penstock.message import Record, headers_of

#: Bytes that a message takes beside its key, value and headers: the objects of the client and of Python.
OVERHEAD_BYTES = 300
#: Bytes that a header takes beside its name and content.
_HEADER_BYTES = 150
#: One of so many messages is the sample, the first among them, in a fetch of more than twice as many. A prime: where
#: several senders alternate, all are seen.
_SAMPLED = 31
_MANY = 2 * _SAMPLED
#: Bytes of key and headers of one message from which on each of its partition is measured.
_LARGE_BYTES = 1024


def size_in_bytes(record: Record) -> int:
    """Return the bytes that a message takes, about."""
    return OVERHEAD_BYTES + len(record) + _unsized_bytes(record)


def total_size_in_bytes(records: Sequence[Record], assignment: Assignment) -> int:
    """Return the bytes that messages of one partition take, about. On the poll thread only."""
    sample = records if assignment.sizes_each or len(records) <= _MANY else records[::_SAMPLED]
    sizes = [_unsized_bytes(record) for record in sample]
    if not assignment.sizes_each and max(sizes) >= _LARGE_BYTES:
        assignment.sizes_each = True
        sizes = [_unsized_bytes(record) for record in records]
    return OVERHEAD_BYTES * len(records) + sum(map(len, records)) + sum(sizes) * len(records) // len(sizes)


def _unsized_bytes(record: Record) -> int:
    """Return the bytes of what a message's own length leaves out."""
    return len(record.key() or b"") + _header_bytes(record)


def _header_bytes(record: Record) -> int:
    try:
        headers = headers_of(record)
    except UnicodeDecodeError:
        return 0  # the client cannot read them at all
    if not headers:
        return 0
    return sum([_HEADER_BYTES + len(name) + len(content or b"") for name, content in headers])
