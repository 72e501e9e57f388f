"""The senders of a task's messages whose traces are sampled, for the span of the batch on the driver."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
import pyarrow.compute as pc

#: Most senders that a task names.
MOST_SENDERS = 32

_NAME = "traceparent"
#: The last characters of a `traceparent` whose flags say that it is sampled (W3C Trace Context).
_SAMPLED = frozenset(b"13579bdf")
#: Bytes of one that is looked at.
_MOST_BYTES = 512


def noting_senders(batches: Iterator[pa.RecordBatch], found: dict[str, None]) -> Iterator[pa.RecordBatch]:
    """Pass the task's rows on; put the `traceparent` of the first that are sampled into `found`."""
    for batch in batches:
        if len(found) < MOST_SENDERS and "headers" in batch.schema.names:
            headers = batch.column("headers").flatten()
            parents = pc.struct_field(headers, "value").filter(pc.equal(pc.struct_field(headers, "key"), _NAME))
            for parent in parents:
                text: bytes = (parent.as_py() or b"")[:_MOST_BYTES]
                if text and text[-1] in _SAMPLED:
                    found[text.decode("latin-1")] = None
                    if len(found) == MOST_SENDERS:
                        break
        yield batch
