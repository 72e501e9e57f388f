"""The redo log of a file store: bytes, segments, records, the state table, and the thread that writes them."""
