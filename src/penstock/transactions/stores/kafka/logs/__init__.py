"""The half, op and done logs: what brokers say of them, how a new owner recovers its state, payloads read again."""
