"""A consumer group's offsets and offset maps: read, moved, written to a file and taken from one, and the lag."""
