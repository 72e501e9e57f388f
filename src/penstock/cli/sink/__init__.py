"""`penstock sink`: what the ledgers of sinks have, and its change on purpose."""
