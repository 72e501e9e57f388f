"""The commands that show a group's offsets and move them."""
