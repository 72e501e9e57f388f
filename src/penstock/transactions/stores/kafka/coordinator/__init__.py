"""The coordinator of a store in Kafka: it owns half partitions, publishes what is decided and asks about the rest."""
