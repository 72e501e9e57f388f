"""What a user may set on the source: its options by Spark's names, and the client settings that they make."""
