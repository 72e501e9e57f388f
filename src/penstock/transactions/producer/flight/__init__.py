"""Transactions on their way into the store: what is in flight, its deadlines, and who waits for it."""
