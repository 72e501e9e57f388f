"""Reports: members publish their state to a topic; a reader derives the state of all groups from it."""
