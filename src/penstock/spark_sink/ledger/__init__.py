"""What every ledger holds, and the rules by which a batch is judged; each sink reads and writes its own ledger."""
