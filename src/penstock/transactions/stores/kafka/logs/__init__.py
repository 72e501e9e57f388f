"""The half, op and done logs: their settings, their bounds, their identity, and payloads that are read again."""
