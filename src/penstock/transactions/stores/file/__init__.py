"""The store in a folder. A redo log is the truth; the state table is the index that is read when the store opens."""
