"""The barrier: a row in the user's database that answers a check without guessing."""
