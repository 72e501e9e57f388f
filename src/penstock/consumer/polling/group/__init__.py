"""The consumer group: joining and leaving it, and what its rebalances give and take."""
