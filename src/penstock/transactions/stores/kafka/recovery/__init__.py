"""Recovery: how a new owner of a half partition shuts its predecessor out and finds the state again."""
