"""What the poll thread alone does: poll, commit, pause, serve rebalances, and look after topics."""
