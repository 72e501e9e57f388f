"""The half partitions that a coordinator owns: membership, and what is read of their logs."""
