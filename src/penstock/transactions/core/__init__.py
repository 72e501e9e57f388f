"""What stores know of transactions that are not settled: how they stand, who is asked, what waits apart. Pure."""
