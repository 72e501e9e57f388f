"""The wire formats of a store in Kafka: records, transaction ids, topic names."""
