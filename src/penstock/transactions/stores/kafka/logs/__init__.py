"""The half, op and done logs: recovery of their state, and checks of topic settings."""
