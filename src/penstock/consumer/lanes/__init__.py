"""The work on a lane that is held: its runs, parked keys and batches. The same for all executors."""
