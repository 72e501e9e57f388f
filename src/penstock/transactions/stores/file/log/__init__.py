"""The redo log of a file store: what it holds, its bytes, its segments, and the thread that writes it."""
