"""How offsets are committed: by the consumer, or in the transactions of the outbox."""
