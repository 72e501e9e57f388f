"""Decided transactions on their way out: their order, their payloads, what they wait for. Pure."""
