"""The entries of ledgers, and the rules for batches; each sink reads and writes its own ledger."""
