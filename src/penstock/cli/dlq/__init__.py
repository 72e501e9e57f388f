"""`penstock dlq`: dead letters, shown and replayed."""
