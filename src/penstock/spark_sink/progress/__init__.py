"""What Spark reports of queries, as statistics, metrics and offsets of groups."""
