"""What a user may set on a handler: its order, its retries, its rates; and what does not go together."""
