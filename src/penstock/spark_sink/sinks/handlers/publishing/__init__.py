"""What handlers on executors return: rows of a task's results, and their publication by `KafkaSink`'s ledger."""
