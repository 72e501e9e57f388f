"""The commands that show what processes report."""
