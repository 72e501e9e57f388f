"""The file store: halves and decisions in a folder of this machine, published exactly once into Kafka.

A redo log is the truth: what it holds is what opening, `penstock tx --file` and the check scheduler go by.
"""

from penstock.transactions.stores.file.store import FileStore

__all__ = ["FileStore"]
