"""The page: what groups reported, kept for half an hour, and shown live in a browser."""
