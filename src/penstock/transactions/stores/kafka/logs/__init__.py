"""The half, op and done logs: what brokers say of them, and how a new owner recovers its state."""
