"""What becomes of messages that failed: retries, parked keys, dead letters."""
