"""Handlers: registration, options, ordering, serialization, and the routes that carry them at run time."""
