"""The page: what groups told of themselves, kept for half an hour, and shown live in a browser."""
