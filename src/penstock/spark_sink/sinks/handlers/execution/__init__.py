"""What a task does with its rows: key by key, in order, with retries and dead letters."""
