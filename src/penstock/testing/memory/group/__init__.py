"""The group coordinator in memory: members, assignments, committed offsets."""
