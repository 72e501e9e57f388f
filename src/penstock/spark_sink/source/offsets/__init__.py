"""What an offset of a query is, which partitions it is of, and how a batch is cut: pure."""
