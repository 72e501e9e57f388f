"""The clients of the Kafka in memory: a consumer with its fetches, membership and commits, and a producer."""
