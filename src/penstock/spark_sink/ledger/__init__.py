"""Ledgers: the next offsets that a sink has yet to apply, changed together with its rows."""
