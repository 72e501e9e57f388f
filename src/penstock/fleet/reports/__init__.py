"""Reports: what members of a group tell of themselves in a topic, and how the state of all groups is read from it."""
