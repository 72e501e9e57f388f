"""What is done with a lane that is held: its runs, its parked keys, its batches; the same for all who call handlers."""
