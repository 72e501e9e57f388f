"""The group coordinator in memory: members, assignments, commits."""
