"""What of the transactions lives in SQL: statements on the user's own connections, and the store in a database."""
