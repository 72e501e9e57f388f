"""The relay's way into Kafka: writers, the log of what was published, and threads with a limit for each call."""
