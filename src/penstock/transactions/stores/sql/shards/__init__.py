"""What a coordinator has of a SQL store: leases, statements of its relays, checks, counts."""
