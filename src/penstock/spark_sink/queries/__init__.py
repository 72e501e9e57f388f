"""The queries of an app's sinks: their start, supervision and end."""
