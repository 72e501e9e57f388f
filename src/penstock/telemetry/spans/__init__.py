"""Spans: of messages sent, handled and published, the context in their headers, and ids in log records."""
