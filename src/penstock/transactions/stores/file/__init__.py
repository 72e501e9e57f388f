"""The file store: halves and decisions in a folder of this machine, published exactly once into Kafka.

A redo log is the truth; a memory-mapped table of 24-byte records shows the state of each transaction beside it.
"""

from penstock.transactions.stores.file.store import FileStore

__all__ = ["FileStore"]
