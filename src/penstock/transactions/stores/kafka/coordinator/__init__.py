"""The coordinator of a store in Kafka: it owns half partitions, publishes decided messages, checks the others."""
