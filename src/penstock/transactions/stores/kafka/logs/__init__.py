"""The half, op and done logs: their settings, their bounds, their identity, their truncation and rereading."""
