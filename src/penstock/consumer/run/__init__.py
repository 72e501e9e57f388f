"""Executors, which call handlers: worker threads and an event loop."""
