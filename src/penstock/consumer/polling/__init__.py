"""The poll thread and what it alone does: fetching, routing, back-pressure, commits, rebalances."""
