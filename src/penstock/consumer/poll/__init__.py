"""The work of the poll thread: poll, commit, pause, serve rebalances, and watch topics."""
