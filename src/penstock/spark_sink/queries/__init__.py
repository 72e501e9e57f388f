"""The queries of an app's sinks: where they start, who looks after them, how they end."""
