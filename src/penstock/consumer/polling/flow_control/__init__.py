"""Which partitions are paused: by back-pressure, and by the app."""
